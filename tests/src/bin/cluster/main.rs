//! `make cluster-test`: the chart in a real cluster, with real pods. The same program also runs in pods of the test. In
//! such a pod it is the inbox, or it calls the Service by name, as an application does.

mod callers;
mod cluster_client;
mod events;
mod inbox;
mod keycloak;
mod load;
mod reach;
mod receiver;
mod scenario;
mod steps;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs all steps in the cluster of `KUBECONFIG`.
    Run(steps::RunArgs),
    /// In a pod: constant load without retries. Reports failures at `:8000/counts`.
    Load(load::LoadArgs),
    /// In a pod: one user, from registration to a changed password.
    Journey(scenario::ScenarioArgs),
    /// In a pod: an SMTP server at :2525 with an inbox at :8025.
    Inbox,
    /// In a pod: an administrator, who manages users of the App.
    Administrator(callers::administrator::AdministratorArgs),
    /// In a pod: the imported users, who log in with their old passwords.
    ImportedUsers(callers::imported_users::ImportedUsersArgs),
    /// In a pod: users who sign in at an application behind oauth2-proxy.
    OpenidUsers(callers::openid_users::OpenidUsersArgs),
    /// In a pod: a ServiceAccount that the App does not list.
    Unlisted(callers::CallerArgs),
    /// In a pod: the consumer of a pull webhook.
    Consumer(callers::ConsumerArgs),
    /// In a pod: the receiver of a push webhook, at :8000.
    Receiver(receiver::ReceiverArgs),
    /// In a pod: prints which addresses accept connections.
    Reach(reach::ReachArgs),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime starts");
    match runtime.block_on(run(args.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cluster-test: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(command: Command) -> Result<()> {
    match command {
        Command::Run(options) => steps::run(&options).await,
        Command::Load(options) => load::run(options).await,
        Command::Journey(options) => scenario::run(&options).await,
        Command::Inbox => inbox::run().await,
        Command::Administrator(options) => callers::administrator::run(&options).await,
        Command::ImportedUsers(options) => callers::imported_users::run(&options).await,
        Command::OpenidUsers(options) => callers::openid_users::run(&options).await,
        Command::Unlisted(options) => callers::call_unlisted(&options).await,
        Command::Consumer(options) => callers::consume(&options).await,
        Command::Receiver(options) => receiver::run(&options).await,
        Command::Reach(options) => {
            reach::run(&options).await;
            Ok(())
        }
    }
}
