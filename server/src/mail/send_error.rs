//! Why a mail was not sent, and whether a retry can help.

/// The stage of an SMTP session at which an error happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Greeting,
    Tls,
    Login,
    Sender,
    Recipient,
    Content,
}

/// Why a mail was not sent. The error messages never contain text that the relay sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SendError {
    #[error("the relay's port {0} is not a mail port")]
    PortNotAllowed(u16),
    #[error("the relay's name does not resolve")]
    NameNotResolved,
    #[error("the relay's address is private or reserved")]
    AddressNotAllowed,
    #[error("the relay does not accept the connection")]
    Unreachable,
    #[error("the relay does not offer STARTTLS")]
    NoStarttls,
    #[error("TLS with the relay failed, or its certificate is not valid for its name")]
    Tls,
    #[error("the relay offers no supported authentication mechanism")]
    NoAuthMechanism,
    #[error("the relay refused {what} ({code})", what = .stage.as_str())]
    Rejected { stage: Stage, code: u16 },
    #[error("the relay closed the connection at {stage}", stage = .0.as_str())]
    ConnectionClosed(Stage),
    #[error("the relay's answer to {stage} is not SMTP", stage = .0.as_str())]
    InvalidReply(Stage),
    #[error("the relay took longer than ten seconds")]
    Timeout,
    #[error("the mail cannot be encoded as a message")]
    InvalidMessage,
}

// === impl Stage ===

impl Stage {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Greeting => "the greeting",
            Self::Tls => "STARTTLS",
            Self::Login => "the login",
            Self::Sender => "the sender",
            Self::Recipient => "the recipient",
            Self::Content => "the message",
        }
    }
}

// === impl SendError ===

impl SendError {
    /// Converts an error of lettre that happened at this stage.
    pub(super) fn from_smtp(stage: Stage, error: &lettre::transport::smtp::Error) -> Self {
        if let Some(code) = error.status() {
            Self::Rejected { stage, code: code.into() }
        } else if error.is_response() {
            Self::InvalidReply(stage)
        } else if error.is_client() && stage == Stage::Login {
            Self::NoAuthMechanism
        } else {
            Self::ConnectionClosed(stage)
        }
    }

    /// Whether a retry is useless: this recipient or this message is rejected permanently (RFC 5321, section 4.2.1).
    /// After an error that the application team or the administrator of the relay can fix (authentication, sender, TLS,
    /// network), the mail is retried. The mail is also retried if the relay rejects the recipient or the message only
    /// because of missing authentication (530) or a bad command sequence (503).
    pub(super) fn is_permanent(self) -> bool {
        match self {
            Self::Rejected { stage: Stage::Recipient | Stage::Content, code } => {
                (500..600).contains(&code) && !matches!(code, 503 | 530)
            }
            Self::InvalidMessage => true,
            Self::Rejected { stage: Stage::Greeting | Stage::Tls | Stage::Login | Stage::Sender, .. }
            | Self::PortNotAllowed(_)
            | Self::NameNotResolved
            | Self::AddressNotAllowed
            | Self::Unreachable
            | Self::NoStarttls
            | Self::Tls
            | Self::NoAuthMechanism
            | Self::ConnectionClosed(_)
            | Self::InvalidReply(_)
            | Self::Timeout => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rejections_of_recipient_or_message_are_permanent() {
        let is_permanent = |stage, code| SendError::Rejected { stage, code }.is_permanent();
        for stage in [Stage::Recipient, Stage::Content] {
            assert!(is_permanent(stage, 550) && is_permanent(stage, 552) && is_permanent(stage, 554), "{stage:?}");
            assert!(!is_permanent(stage, 421) && !is_permanent(stage, 451), "{stage:?}");
            assert!(!is_permanent(stage, 530) && !is_permanent(stage, 503), "{stage:?}");
        }
        for stage in [Stage::Greeting, Stage::Tls, Stage::Login, Stage::Sender] {
            assert!(!is_permanent(stage, 535) && !is_permanent(stage, 554) && !is_permanent(stage, 421), "{stage:?}");
        }
        for error in [SendError::Timeout, SendError::Tls, SendError::Unreachable, SendError::AddressNotAllowed] {
            assert!(!error.is_permanent(), "{error}");
        }
    }
}
