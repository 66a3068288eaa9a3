//! The Lua scripts. A script runs atomically, and all its keys are in one slot.

use redis::{Cmd, Pipeline, Script};

/// The source text of a script: the shared parts from `scripts/lib`, then `scripts/NAME.lua`.
macro_rules! script_source {
    ($name:ident $($part:ident)*) => {
        concat!(
            $(include_str!(concat!("scripts/lib/", stringify!($part), ".lua")),)*
            include_str!(concat!("scripts/", stringify!($name), ".lua")),
        )
    };
}

/// Declares the scripts, each with its shared parts.
macro_rules! scripts {
    ($($name:ident: $($part:ident),*;)+) => {
        pub(super) struct Scripts {
            $(pub(super) $name: Script,)+
        }

        impl Scripts {
            const SOURCES: &[&str] = &[$(script_source!($name $($part)*)),+];

            pub(super) fn new() -> Self {
                Self { $($name: Script::new(script_source!($name $($part)*)),)+ }
            }
        }
    };
}

scripts! {
    acquire: now, windows;
    check_limit: now, windows;
    consume_flow: flows;
    count_refusal: now;
    due_quarters: now;
    end_client_sessions: client_sessions;
    end_other_sessions: client_sessions;
    end_session: now, session;
    get_client_session: now, session;
    get_session: now, session;
    list_client_sessions: now, client_sessions;
    list_sessions: now;
    open_client_session: now, session, client_sessions;
    open_session: now, session;
    raise_epoch: session, client_sessions;
    redeem_client_code:;
    refresh: now, session, rate_marks;
    release:;
    renew_browser_session: now, session;
    retire_user: now, client_sessions;
    store_flow: now, flows;
    store_groups:;
    store_profile: session;
}

// === impl Scripts ===

impl Scripts {
    /// Commands that load all scripts, so that calls can use EVALSHA.
    pub(super) fn load(&self) -> Pipeline {
        let mut pipeline = Pipeline::new();
        for source in Self::SOURCES {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(*source);
        }
        pipeline
    }
}

/// Builds a command that runs a loaded script.
pub(super) fn script_command(script: &Script, keys: &[String], arguments: &[String]) -> Cmd {
    let mut command = redis::cmd("EVALSHA");
    command.arg(script.get_hash()).arg(keys.len()).arg(keys).arg(arguments);
    command
}
