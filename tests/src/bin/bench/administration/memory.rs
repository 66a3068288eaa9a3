//! The peak memory of the server, compared with its peak memory under logins only.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use http::StatusCode;
use latchkey_tests::passwords::WRONG_PASSWORD;

use super::{
    Service,
    administrator::{Batch, scrypt_hash},
    load::login_rate,
    storm::{ORDINARY_CLIENTS, STORM_CLIENTS},
};
use crate::{
    logins::{self, client_address, connect, log_in_request_of},
    measurements::{Bound, peak_resident_mib},
};

/// Number of clients while there are only logins: as many as in the part with the most clients.
const CLIENTS: u32 = ORDINARY_CLIENTS + STORM_CLIENTS;
/// Duration of the logins.
const LOGIN_TIME: Duration = Duration::from_secs(10);
/// Maximum additional memory of the server, compared with its peak under logins only.
const MAX_GROWTH_MIB: f64 = 4.0;
/// Memory that a check of the scrypt hash needs, in addition to the memory of other logins.
const SCRYPT_MIB: f64 = 128.0;
/// Number of concurrent logins to the App with a scrypt hash.
const SCRYPT_LOGINS: u32 = 4;

/// The peak memory of the server process so far.
pub(super) struct PeakMemory {
    pid: u32,
    /// The peak under logins only, in MiB.
    logins_only: f64,
    /// The peak after the last recorded part of the benchmark, in MiB.
    latest: f64,
}

// === impl PeakMemory ===

impl PeakMemory {
    /// Logs in for [`LOGIN_TIME`], and records the peak memory.
    pub(super) async fn start(service: &Service) -> Result<Self> {
        let pid = service.stack.server().pid().context("the server runs")?;
        let rate = login_rate(service.public(), service.apps.ordinary.id(), CLIENTS, LOGIN_TIME).await?;
        let peak = peak_resident_mib(pid)?;
        println!("logins only, by {CLIENTS} clients: {rate:.1} per second, peak memory {peak:.1} MiB\n");
        Ok(Self { pid, logins_only: peak, latest: peak })
    }

    /// Records and prints the peak after a part of the benchmark.
    pub(super) fn record(&mut self, part: &str) -> Result<()> {
        self.latest = peak_resident_mib(self.pid)?;
        println!("peak memory after {part}: {:.1} MiB ({:+.1} MiB)\n", self.latest, self.growth());
        Ok(())
    }

    /// The bound on the growth up to the last recorded peak.
    pub(super) fn bound(&self) -> Bound {
        let growth = self.growth();
        Bound::new(
            format!(
                "peak memory is at most {MAX_GROWTH_MIB} MiB above that of logins only ({:.1} MiB): {growth:+.1} MiB",
                self.logins_only
            ),
            growth <= MAX_GROWTH_MIB,
        )
    }

    /// Prints the peak after logins to an App with a scrypt hash. No bound applies to it.
    pub(super) async fn print_with_scrypt(mut self, service: &Service) -> Result<()> {
        let app = service.apps.scrypt.id();
        let users = Batch::new(1, scrypt_hash);
        service.administrator().await?.import(app, users.lines(), users.len()).await?;
        let email = users.emails[0].as_str();
        let logins = (0..SCRYPT_LOGINS).map(|number| async move {
            let mut connection = connect(service.public(), client_address(number)).await?;
            let request = log_in_request_of(service.public(), app, email, WRONG_PASSWORD);
            anyhow::Ok(logins::send(&mut connection, request).await?.status)
        });
        let statuses = try_join_all(logins).await?;
        ensure!(statuses.contains(&StatusCode::UNAUTHORIZED), "logins with a scrypt hash returned {statuses:?}");
        self.record(&format!("logins with a scrypt hash of {SCRYPT_MIB} MiB"))?;
        println!("  allowed with such hashes: {:+.1} MiB", SCRYPT_MIB + MAX_GROWTH_MIB);
        Ok(())
    }

    fn growth(&self) -> f64 {
        self.latest - self.logins_only
    }
}
