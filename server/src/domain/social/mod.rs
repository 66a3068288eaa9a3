//! Social login, from *redirect* to a session, and the identities of a user (specification: Social login).

mod callback;
mod error;
mod exchange;
mod groups;
mod identities;
mod login_attempt;
mod plan;
mod provider;
mod redirect;
mod token_login;

pub use callback::{CallbackError, CallbackInput, FinishedFlow, FlowResult, finish_flow};
pub use error::ProviderLoginError;
pub use exchange::{CodeExchangeError, CodeExchangeInput, ExchangedSession, exchange_code};
pub(in crate::domain) use identities::link_stored_identity;
pub use identities::{LinkError, link_identity, list_identities, unlink_identity};
pub use login_attempt::ProviderLogin;
pub use provider::find_provider;
pub use redirect::{
    InvalidText, MAX_HINT_CHARS, MAX_STATE_PARAM_CHARS, StartFlowError, StartFlowInput, StartedFlow, page_target,
    start_flow,
};
pub use token_login::log_in_with_token;
