//! The command line of `latchkey-server import`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use url::Url;

/// The login service that wrote the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Files of `kc.sh export`.
    Keycloak,
    /// The tables auth.users and auth.identities of Supabase Auth, one JSON object per line. The files can be in any
    /// order.
    Gotrue,
    /// Identities of Ory Kratos with their credentials, as the admin API returns them.
    Kratos,
    /// The JSON file of `firebase auth:export`.
    Firebase,
    /// The export of users and the export of password hashes of Auth0, one JSON object per line. The files can be in
    /// any order.
    Auth0,
    /// The JSON of `aws cognito-idp list-users`, or a CSV file with the columns of Cognito. Neither has hashes.
    Cognito,
    /// Lines in the format of the administration API, for example an export of Latchkey.
    Ndjson,
}

/// Import users of another login service into an App. Repeat the same command to resume: users that already exist do
/// not change.
///
/// Exit status: 0 if no user that should be imported was left out, 1 if at least one user was refused or could not be
/// imported, 2 if the import did not run to its end.
#[derive(Args, Clone, Debug)]
pub struct ImportArgs {
    /// The login service that wrote the files.
    #[arg(value_enum)]
    pub format: Format,
    /// The files. `-` is standard input.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// appID of the App that gets the users.
    #[arg(long, value_name = "ID", required_unless_present = "output", value_parser = parse_app)]
    pub app: Option<String>,
    /// File with a token of a ServiceAccount that has the role Importer or UserAdmin in the App. The file is read again
    /// if the server does not accept the token.
    #[arg(long, value_name = "FILE", required_unless_present = "output")]
    pub token_file: Option<PathBuf>,
    /// URL of the administration API.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081", value_parser = parse_server)]
    pub server: Url,
    /// Import the identities at the provider that the source calls ALIAS, as identities at the App's Provider PROVIDER.
    /// Can be repeated. Identities without a mapping are not imported, except for ndjson, where they keep their
    /// provider.
    #[arg(long = "map", value_name = "ALIAS=PROVIDER", value_parser = parse_mapping)]
    pub mappings: Vec<(String, String)>,
    /// kratos: JSON pointer to the email address in the traits.
    #[arg(long, value_name = "POINTER", default_value = "/email", value_parser = parse_pointer)]
    pub email_trait: String,
    /// kratos: JSON pointer to the name in the traits: a text, or an object with `first` and `last`.
    #[arg(long, value_name = "POINTER", default_value = "/name", value_parser = parse_pointer)]
    pub name_trait: String,
    /// firebase: `rounds` of the project's password hash parameters.
    #[arg(long, value_name = "NUMBER", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=255))]
    pub rounds: u32,
    /// firebase: `mem_cost` of the project's password hash parameters.
    #[arg(long, value_name = "NUMBER", default_value_t = 14, value_parser = clap::value_parser!(u32).range(1..=31))]
    pub memory_cost: u32,
    /// Import every email address as verified. Without this flag, an address is verified if the source says so.
    #[arg(long)]
    pub addresses_verified: bool,
    /// Also import attributes, traits and metadata of users, as `metadata` of at most 8 KiB for each user.
    #[arg(long)]
    pub metadata: bool,
    /// Check the users on the server, but import none.
    #[arg(long, conflicts_with = "output")]
    pub dry_run: bool,
    /// Only write the lines for the server to this file, and send nothing. The lines contain password hashes, so only
    /// the owner can read the file. A file with content is never overwritten.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

impl Format {
    /// The name on the command line, which is also the parameter `source` of a request.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Keycloak => "keycloak",
            Self::Gotrue => "gotrue",
            Self::Kratos => "kratos",
            Self::Firebase => "firebase",
            Self::Auth0 => "auth0",
            Self::Cognito => "cognito",
            Self::Ndjson => "ndjson",
        }
    }
}

fn parse_app(text: &str) -> Result<String, &'static str> {
    let is_label = (1..=63).contains(&text.len())
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        && !text.starts_with('-')
        && !text.ends_with('-');
    is_label.then(|| text.to_owned()).ok_or("is not an appID")
}

fn parse_server(text: &str) -> Result<Url, &'static str> {
    let url: Url = text.parse().map_err(|_| "is not a URL")?;
    if url.scheme() != "http" {
        return Err(
            "is not an http:// URL; the administration API has no TLS, so use it inside the cluster or through \
                    kubectl port-forward",
        );
    }
    let has_extras = !url.username().is_empty() || url.password().is_some() || url.query().is_some();
    if has_extras || url.fragment().is_some() || url.host_str().is_none() {
        return Err("is not a URL of the form http://HOST:PORT");
    }
    Ok(url)
}

fn parse_mapping(text: &str) -> Result<(String, String), &'static str> {
    match text.rsplit_once('=') {
        Some((alias, provider)) if !alias.is_empty() && !provider.is_empty() => {
            Ok((alias.to_owned(), provider.to_owned()))
        }
        _ => Err("is not ALIAS=PROVIDER"),
    }
}

fn parse_pointer(text: &str) -> Result<String, &'static str> {
    if text.starts_with('/') { Ok(text.to_owned()) } else { Err("is not a JSON pointer such as /email") }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches};

    use super::*;

    fn parse(arguments: &[&str]) -> Result<ImportArgs, clap::Error> {
        let command = ImportArgs::augment_args(Command::new("import"));
        let arguments = ["import"].iter().chain(arguments);
        command.try_get_matches_from(arguments).and_then(|matches| ImportArgs::from_arg_matches(&matches))
    }

    #[test]
    fn the_defaults_are_those_of_the_specification() {
        let args = parse(&["keycloak", "a.json", "-", "--app", "shop", "--token-file", "t"]).unwrap();
        assert_eq!((args.format, args.files.len()), (Format::Keycloak, 2));
        assert_eq!(args.server.as_str(), "http://127.0.0.1:8081/");
        assert_eq!((args.email_trait.as_str(), args.name_trait.as_str()), ("/email", "/name"));
        assert_eq!((args.rounds, args.memory_cost), (8, 14));
        assert!(!args.addresses_verified && !args.metadata && !args.dry_run);
    }

    #[test]
    fn only_output_to_a_file_needs_neither_app_nor_token() {
        assert!(parse(&["ndjson", "a"]).is_err());
        assert!(parse(&["ndjson", "a", "--app", "shop"]).is_err());
        assert!(parse(&["ndjson", "a", "--token-file", "t"]).is_err());
        assert!(parse(&["ndjson", "a", "--output", "o"]).is_ok());
        assert!(parse(&["ndjson", "a", "--output", "o", "--dry-run"]).is_err());
    }

    #[test]
    fn bad_values_are_rejected() {
        for bad in [
            ["--app", "Shop"],
            ["--app", "shop/../other"],
            ["--server", "https://latchkey.example.com"],
            ["--server", "http://a:b@latchkey"],
            ["--server", "http://latchkey/?a=b"],
            ["--map", "google"],
            ["--map", "=google"],
            ["--email-trait", "email"],
            ["--rounds", "0"],
            ["--memory-cost", "32"],
        ] {
            assert!(parse(&["ndjson", "a", "--output", "o", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
        let args = parse(&["ndjson", "a", "--output", "o", "--map", "sso:a=b=c"]).unwrap();
        assert_eq!(args.mappings, [("sso:a=b".to_owned(), "c".to_owned())]);
    }
}
