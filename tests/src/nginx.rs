//! A real NGINX in its own process.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context, Result};
use tokio::net::TcpStream;

use crate::{
    eventually_ok,
    process::{self, Process, Program},
};

/// Time limit for NGINX to start. This takes milliseconds, longer on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(30);

/// A running NGINX. It is killed when this value is dropped.
pub struct Nginx {
    addr: SocketAddr,
    _process: Process,
}

// === impl Nginx ===

impl Nginx {
    /// Starts NGINX. `http` is the content of the `http` block, which must listen on `addr`.
    pub async fn start(addr: SocketAddr, http: &str) -> Result<Self> {
        // On Debian, only root has NGINX in its PATH.
        let program = process::find_program(["/usr/sbin/nginx", "nginx"])
            .context("NGINX is not installed: run `make tools`, or `make test`, which does it")?;
        let dir = process::fresh_dir("nginx");
        let config = dir.join("nginx.conf");
        fs::write(&config, configuration(&dir, http))?;
        let process = Program::new("nginx", program, dir.join("nginx.log"))
            .path_arg("-p", &dir)
            .path_arg("-c", &config)
            // Without this flag, NGINX logs to a system file until it has read the configuration.
            .args(["-e", "stderr"])
            .start()?;
        eventually_ok("NGINX listens", START_LIMIT, || async {
            if let Some(status) = process.exit_status() {
                panic!("NGINX ended with {status}:\n{}", process::tail(process.log_path(), 20));
            }
            TcpStream::connect(addr).await
        })
        .await;
        Ok(Self { addr, _process: process })
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// The configuration file. NGINX runs as one process, so that no process outlives the test. All its files are in `dir`.
fn configuration(dir: &Path, http: &str) -> String {
    let dir = dir.display();
    format!(
        "daemon off;\n\
         master_process off;\n\
         error_log stderr warn;\n\
         pid {dir}/nginx.pid;\n\
         events {{ worker_connections 256; }}\n\
         http {{\n\
         access_log off;\n\
         client_body_temp_path {dir}/body;\n\
         proxy_temp_path {dir}/proxy;\n\
         fastcgi_temp_path {dir}/fastcgi;\n\
         uwsgi_temp_path {dir}/uwsgi;\n\
         scgi_temp_path {dir}/scgi;\n\
         {http}\n\
         }}\n"
    )
}
