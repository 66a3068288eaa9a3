//! The providers that are known by name: one table entry each, from the provider's own documentation.
//!
//! A name of a claim that begins with `/` is a JSON pointer (RFC 6901), else a member of the answer.

/// What is to be known of a provider.
#[derive(Debug)]
pub(super) struct Preset {
    pub(super) name: &'static str,
    pub(super) server: Server,
    pub(super) scopes: &'static [&'static str],
    pub(super) authentication: Authentication,
    /// PKCE (RFC 7636). Off only where the provider's own flow breaks with it (docs/decisions/0020).
    pub(super) pkce: bool,
    /// The ID token repeats the nonce.
    pub(super) nonce: bool,
    /// The callback is a POST.
    pub(super) form_post: bool,
    /// More parameters of the authorization address.
    pub(super) parameters: &'static [(&'static str, &'static str)],
    /// Values of `prompt` that it knows.
    pub(super) prompts: &'static [&'static str],
    /// The parameter in which it takes `login_hint`.
    pub(super) login_hint: Option<&'static str>,
    pub(super) profile: Profile,
    pub(super) claims: Claims,
    pub(super) check: Check,
    /// How a made-up code tells whether the client is known.
    pub(super) refusals: Refusals,
}

/// Where its endpoints are from.
#[derive(Debug)]
pub(super) enum Server {
    /// OpenID Connect Discovery 1.0: everything from the issuer's document.
    Discovered {
        issuer: Issuer,
        /// What its tokens may say instead of the issuer; the identity's authority is the issuer all the same.
        also: &'static [&'static str],
    },
    Fixed {
        /// With the preset's name the authority of its identities.
        base_url: &'static str,
        /// What it sends as `iss` (RFC 9207), where that is known.
        issuer: Option<&'static str>,
        authorization: &'static str,
        token: &'static str,
    },
    /// By the Provider's `authorizationURL`, `tokenURL`, `userInfoURL` and `introspectionURL`.
    Given,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Issuer {
    Fixed(&'static str),
    /// By this option of the Provider.
    Option(&'static str),
    /// Microsoft: by `tenant`, where the document's issuer is a template for some.
    Tenant,
}

/// How the client shows its secret at the token endpoint (RFC 6749, 2.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Authentication {
    Basic,
    Post,
    /// Basic unless the discovery document knows only Post.
    Discovered,
    /// By the Provider's `clientAuthentication`.
    Given,
    /// Post, with a secret that is a JWT under Apple's key.
    AppleKey,
}

/// Where it tells who the user is.
#[derive(Debug)]
pub(super) enum Profile {
    /// The ID token and, for what it lacks, the userinfo endpoint of the discovery document.
    IdToken,
    Endpoint {
        url: &'static str,
        headers: &'static [(&'static str, &'static str)],
        proof: Proof,
        addresses: Option<Addresses>,
    },
    /// By the Provider's `userInfoURL`.
    Given,
}

/// What a profile endpoint wants beside the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    None,
    /// Facebook: `appsecret_proof`, the token under the secret.
    AppSecret,
    /// Twitch: the client's id in `Client-Id`.
    ClientId,
}

/// A list of the user's addresses, of which the primary one is taken.
#[derive(Debug)]
pub(super) struct Addresses {
    pub(super) url: &'static str,
    /// A pointer to the list; empty where it is the whole answer.
    pub(super) list: &'static str,
    pub(super) address: &'static str,
    pub(super) primary: &'static str,
    pub(super) verified: &'static str,
}

/// Under which names it tells what.
#[derive(Debug)]
pub(super) enum Claims {
    Fixed {
        /// Joined by a hyphen where one alone is not unique.
        subject: &'static [&'static str],
        email: Option<&'static str>,
        verified: Verified,
        /// The first that is there.
        name: &'static [&'static str],
    },
    /// By the Provider's `claims`.
    Given,
}

/// Its own source of whether the address is the user's (contract, 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verified {
    /// It has none.
    Never,
    /// It tells only addresses that it has verified, and says so.
    Documented,
    /// This claim is `true`.
    Claim(&'static str),
    /// This claim is `true` or 1.
    ClaimOrOne(&'static str),
    /// The list of [`Addresses`] says it.
    Listed,
}

/// How an access token is asked for whose client it is. ID tokens need no such question.
#[derive(Debug)]
pub(super) enum Check {
    /// There is no way.
    None,
    Ask {
        method: Method,
        /// `{client_id}` is filled in.
        url: &'static str,
        token: TokenIn,
        caller: Caller,
        /// A member that must be `true`.
        valid: Option<&'static str>,
        /// Members that name the client: each that is there must be ours, and one must be there.
        clients: &'static [&'static str],
        /// A member that must be the profile's subject.
        subject: Option<&'static str>,
        /// Statuses that say that the token is not valid.
        unknown: &'static [u16],
        /// It answers for tokens of the caller alone, so not for `additionalClientIDs`.
        caller_only: bool,
    },
    /// RFC 7662, at the `introspection_endpoint` of the discovery document, where there is one.
    Discovered,
    /// RFC 7662, at the Provider's `introspectionURL`, where there is one.
    Given,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Post,
}

/// Where the token is in the question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenIn {
    Query(&'static str),
    Form(&'static str),
    Json(&'static str),
    /// The scheme of `Authorization`.
    Header(&'static str),
}

/// How the one who asks shows who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// It does not.
    Anybody,
    Basic,
    Form,
    /// Facebook: `access_token=id|secret` in the query.
    AppToken,
}

/// What it answers to a wrong code, beside `invalid_grant`, and to a client that it does not know, beside
/// `invalid_client` and `unauthorized_client`.
#[derive(Debug)]
pub(super) struct Refusals {
    pub(super) code: &'static [&'static str],
    pub(super) client: &'static [&'static str],
}

const STANDARD: Refusals = Refusals { code: &[], client: &[] };

/// Values of `prompt` in OpenID Connect Core 1.0, 3.1.2.1.
const PROMPTS: &[&str] = &["none", "login", "consent", "select_account"];

const OIDC_SCOPES: &[&str] = &["openid", "email", "profile"];

const OIDC_CLAIMS: Claims = Claims::Fixed {
    subject: &["sub"],
    email: Some("email"),
    verified: Verified::Claim("email_verified"),
    name: &["name"],
};

/// Every preset, in the order of `ProviderClient::MEMBERS`.
pub(super) static PRESETS: [Preset; 15] = [
    // https://developers.google.com/identity/openid-connect/openid-connect (parameters, `iss`, `email_verified`);
    // https://developers.google.com/identity/sign-in/web/backend-auth (tokens of other clients, tokeninfo)
    Preset {
        name: "google",
        server: Server::Discovered {
            issuer: Issuer::Fixed("https://accounts.google.com"),
            also: &["accounts.google.com"],
        },
        scopes: OIDC_SCOPES,
        authentication: Authentication::Post,
        pkce: true,
        nonce: true,
        form_post: false,
        parameters: &[],
        prompts: &["none", "consent", "select_account"],
        login_hint: Some("login_hint"),
        profile: Profile::IdToken,
        claims: OIDC_CLAIMS,
        check: Check::Ask {
            method: Method::Get,
            url: "https://oauth2.googleapis.com/tokeninfo",
            token: TokenIn::Query("access_token"),
            caller: Caller::Anybody,
            valid: None,
            clients: &["aud", "azp"],
            subject: Some("sub"),
            unknown: &[400],
            caller_only: false,
        },
        refusals: STANDARD,
    },
    // https://developer.apple.com/documentation/signinwithapplerestapi (`response_mode`, client secret, `user`);
    // https://developer.apple.com/documentation/signinwithapple/authenticating-users-with-sign-in-with-apple (claims)
    Preset {
        name: "apple",
        server: Server::Discovered { issuer: Issuer::Fixed("https://appleid.apple.com"), also: &[] },
        scopes: &["openid", "email", "name"],
        authentication: Authentication::AppleKey,
        pkce: true,
        nonce: true,
        form_post: true,
        parameters: &[("response_mode", "form_post")],
        prompts: &[],
        login_hint: None,
        profile: Profile::IdToken,
        claims: OIDC_CLAIMS,
        check: Check::None,
        refusals: STANDARD,
    },
    // https://docs.github.com/en/apps/oauth-apps/building-oauth-apps/authorizing-oauth-apps (flow, PKCE, `prompt`, `login`);
    // https://docs.github.com/en/rest/users/emails (primary, verified);
    // https://docs.github.com/en/rest/apps/oauth-applications#check-a-token
    Preset {
        name: "github",
        server: Server::Fixed {
            base_url: "https://github.com",
            issuer: Some("https://github.com/login/oauth"),
            authorization: "https://github.com/login/oauth/authorize",
            token: "https://github.com/login/oauth/access_token",
        },
        scopes: &["read:user", "user:email"],
        authentication: Authentication::Post,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &["select_account"],
        login_hint: Some("login"),
        profile: Profile::Endpoint {
            url: "https://api.github.com/user",
            headers: &[("accept", "application/vnd.github+json"), ("x-github-api-version", "2022-11-28")],
            proof: Proof::None,
            addresses: Some(Addresses {
                url: "https://api.github.com/user/emails?per_page=100",
                list: "",
                address: "email",
                primary: "primary",
                verified: "verified",
            }),
        },
        claims: Claims::Fixed { subject: &["id"], email: None, verified: Verified::Listed, name: &["name", "login"] },
        check: Check::Ask {
            method: Method::Post,
            url: "https://api.github.com/applications/{client_id}/token",
            token: TokenIn::Json("access_token"),
            caller: Caller::Basic,
            valid: None,
            clients: &["/app/client_id"],
            subject: Some("/user/id"),
            unknown: &[404, 422],
            caller_only: true,
        },
        refusals: Refusals { code: &["bad_verification_code"], client: &["incorrect_client_credentials"] },
    },
    // https://docs.gitlab.com/integration/openid_connect_provider/ (claims);
    // https://docs.gitlab.com/api/oauth2/ (flow, PKCE)
    Preset {
        name: "gitlab",
        server: Server::Discovered { issuer: Issuer::Option("baseURL"), also: &[] },
        scopes: OIDC_SCOPES,
        authentication: Authentication::Discovered,
        pkce: true,
        nonce: true,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::IdToken,
        claims: OIDC_CLAIMS,
        check: Check::Discovered,
        refusals: STANDARD,
    },
    // https://learn.microsoft.com/entra/identity-platform/v2-oauth2-auth-code-flow (parameters);
    // https://learn.microsoft.com/entra/identity-platform/access-tokens#validate-the-issuer (templates, key issuers);
    // https://learn.microsoft.com/entra/identity-platform/optional-claims-reference (`xms_edov`)
    Preset {
        name: "microsoft",
        server: Server::Discovered { issuer: Issuer::Tenant, also: &[] },
        scopes: OIDC_SCOPES,
        authentication: Authentication::Post,
        pkce: true,
        nonce: true,
        form_post: false,
        parameters: &[],
        prompts: PROMPTS,
        login_hint: Some("login_hint"),
        profile: Profile::IdToken,
        claims: Claims::Fixed {
            subject: &["sub"],
            email: Some("email"),
            // What Microsoft calls `email` may be anything that a tenant's administrator wrote.
            verified: Verified::ClaimOrOne("xms_edov"),
            name: &["name"],
        },
        check: Check::None,
        refusals: STANDARD,
    },
    // https://developers.facebook.com/docs/facebook-login/guides/advanced/manual-flow (flow, debug_token);
    // https://developers.facebook.com/docs/facebook-login/guides/advanced/oidc-token (PKCE: with the scope `openid`,
    // without which the dialog drops the challenge and the token endpoint then refuses the verifier);
    // https://developers.facebook.com/docs/graph-api/reference/user (`email`: nothing says that it is verified);
    // https://developers.facebook.com/docs/graph-api/guides/secure-requests (`appsecret_proof`).
    // Its ID token is not looked at: the profile is of the same answer's access token, and tells more.
    Preset {
        name: "facebook",
        server: Server::Fixed {
            base_url: "https://www.facebook.com",
            issuer: None,
            authorization: "https://www.facebook.com/v24.0/dialog/oauth",
            token: "https://graph.facebook.com/v24.0/oauth/access_token",
        },
        scopes: &["openid", "email", "public_profile"],
        authentication: Authentication::Post,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::Endpoint {
            url: "https://graph.facebook.com/v24.0/me?fields=id,name,email",
            headers: &[],
            proof: Proof::AppSecret,
            addresses: None,
        },
        claims: Claims::Fixed { subject: &["id"], email: Some("email"), verified: Verified::Never, name: &["name"] },
        check: Check::Ask {
            method: Method::Get,
            url: "https://graph.facebook.com/v24.0/debug_token",
            token: TokenIn::Query("input_token"),
            caller: Caller::AppToken,
            valid: Some("/data/is_valid"),
            clients: &["/data/app_id"],
            subject: Some("/data/user_id"),
            unknown: &[400],
            caller_only: true,
        },
        refusals: Refusals { code: &["100"], client: &["1", "101"] },
    },
    // https://docs.discord.com/developers/topics/oauth2 (flow, `prompt`, `/oauth2/@me`);
    // https://docs.discord.com/developers/resources/user (`verified`, `global_name`)
    Preset {
        name: "discord",
        server: Server::Fixed {
            base_url: "https://discord.com",
            issuer: None,
            authorization: "https://discord.com/oauth2/authorize",
            token: "https://discord.com/api/oauth2/token",
        },
        scopes: &["identify", "email"],
        authentication: Authentication::Post,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &["none", "consent"],
        login_hint: None,
        profile: Profile::Endpoint {
            url: "https://discord.com/api/v10/users/@me",
            headers: &[],
            proof: Proof::None,
            addresses: None,
        },
        claims: Claims::Fixed {
            subject: &["id"],
            email: Some("email"),
            verified: Verified::Claim("verified"),
            name: &["global_name", "username"],
        },
        check: Check::Ask {
            method: Method::Get,
            url: "https://discord.com/api/v10/oauth2/@me",
            token: TokenIn::Header("Bearer"),
            caller: Caller::Anybody,
            valid: None,
            clients: &["/application/id"],
            subject: Some("/user/id"),
            unknown: &[401],
            caller_only: false,
        },
        refusals: STANDARD,
    },
    // https://learn.microsoft.com/linkedin/consumer/integrations/self-serve/sign-in-with-linkedin-v2 (claims, `iss`);
    // https://learn.microsoft.com/linkedin/shared/authentication/token-introspection.
    // No nonce: the ID token does not repeat it. PKCE off: the token endpoint takes a client that sends a verifier for
    // another one (`invalid_client`).
    Preset {
        name: "linkedin",
        server: Server::Discovered {
            issuer: Issuer::Fixed("https://www.linkedin.com/oauth"),
            also: &["https://www.linkedin.com"],
        },
        scopes: OIDC_SCOPES,
        authentication: Authentication::Post,
        pkce: false,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::IdToken,
        claims: OIDC_CLAIMS,
        check: Check::Ask {
            method: Method::Post,
            url: "https://www.linkedin.com/oauth/v2/introspectToken",
            token: TokenIn::Form("token"),
            caller: Caller::Form,
            valid: Some("active"),
            clients: &["client_id"],
            subject: None,
            unknown: &[400],
            caller_only: true,
        },
        refusals: STANDARD,
    },
    // https://docs.x.com/fundamentals/authentication/oauth-2-0/authorization-code (confidential client, PKCE);
    // https://docs.x.com/x-api/users/get-my-user (`confirmed_email`, with the scope `users.email`)
    Preset {
        name: "x",
        server: Server::Fixed {
            base_url: "https://x.com",
            issuer: None,
            authorization: "https://x.com/i/oauth2/authorize",
            token: "https://api.x.com/2/oauth2/token",
        },
        scopes: &["users.read", "tweet.read", "users.email"],
        authentication: Authentication::Basic,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::Endpoint {
            url: "https://api.x.com/2/users/me?user.fields=confirmed_email",
            headers: &[],
            proof: Proof::None,
            addresses: None,
        },
        claims: Claims::Fixed {
            subject: &["/data/id"],
            email: Some("/data/confirmed_email"),
            verified: Verified::Documented,
            name: &["/data/name", "/data/username"],
        },
        check: Check::None,
        refusals: STANDARD,
    },
    // https://docs.slack.dev/authentication/sign-in-with-slack (flow, claims; a user's id is unique in its team only);
    // https://docs.slack.dev/reference/methods/openid.connect.token (`code_verifier`).
    Preset {
        name: "slack",
        server: Server::Discovered { issuer: Issuer::Fixed("https://slack.com"), also: &[] },
        scopes: OIDC_SCOPES,
        authentication: Authentication::Post,
        pkce: true,
        nonce: true,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::IdToken,
        claims: Claims::Fixed {
            subject: &["https://slack.com/team_id", "sub"],
            email: Some("email"),
            verified: Verified::Claim("email_verified"),
            name: &["name"],
        },
        check: Check::None,
        refusals: Refusals {
            code: &["invalid_code", "code_already_used"],
            client: &["invalid_client_id", "bad_client_secret"],
        },
    },
    // https://support.atlassian.com/bitbucket-cloud/docs/use-oauth-on-bitbucket-cloud/ (flow);
    // https://developer.atlassian.com/cloud/bitbucket/rest/api-group-users/ (`is_primary`, `is_confirmed`)
    Preset {
        name: "bitbucket",
        server: Server::Fixed {
            base_url: "https://bitbucket.org",
            issuer: None,
            authorization: "https://bitbucket.org/site/oauth2/authorize",
            token: "https://bitbucket.org/site/oauth2/access_token",
        },
        scopes: &["account", "email"],
        authentication: Authentication::Basic,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::Endpoint {
            url: "https://api.bitbucket.org/2.0/user",
            headers: &[],
            proof: Proof::None,
            addresses: Some(Addresses {
                url: "https://api.bitbucket.org/2.0/user/emails?pagelen=100",
                list: "/values",
                address: "email",
                primary: "is_primary",
                verified: "is_confirmed",
            }),
        },
        claims: Claims::Fixed {
            subject: &["uuid"],
            email: None,
            verified: Verified::Listed,
            name: &["display_name", "nickname"],
        },
        check: Check::None,
        refusals: STANDARD,
    },
    // https://dev.twitch.tv/docs/authentication/getting-tokens-oauth/ (flow), …/authentication/validate-tokens/;
    // https://dev.twitch.tv/docs/api/reference/#get-users (`email`: "the user's verified email address")
    Preset {
        name: "twitch",
        server: Server::Fixed {
            base_url: "https://www.twitch.tv",
            issuer: None,
            authorization: "https://id.twitch.tv/oauth2/authorize",
            token: "https://id.twitch.tv/oauth2/token",
        },
        scopes: &["user:read:email"],
        authentication: Authentication::Post,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::Endpoint {
            url: "https://api.twitch.tv/helix/users",
            headers: &[],
            proof: Proof::ClientId,
            addresses: None,
        },
        claims: Claims::Fixed {
            subject: &["/data/0/id"],
            email: Some("/data/0/email"),
            verified: Verified::Documented,
            name: &["/data/0/display_name", "/data/0/login"],
        },
        check: Check::Ask {
            method: Method::Get,
            url: "https://id.twitch.tv/oauth2/validate",
            token: TokenIn::Header("OAuth"),
            caller: Caller::Anybody,
            valid: None,
            clients: &["client_id"],
            subject: Some("user_id"),
            unknown: &[401],
            caller_only: false,
        },
        refusals: Refusals {
            code: &["Invalid authorization code"],
            client: &["invalid client", "invalid client secret"],
        },
    },
    // https://developer.spotify.com/documentation/web-api/tutorials/code-flow (flow);
    // https://developer.spotify.com/documentation/web-api/reference/get-current-users-profile (`email` is unverified)
    Preset {
        name: "spotify",
        server: Server::Fixed {
            base_url: "https://accounts.spotify.com",
            issuer: None,
            authorization: "https://accounts.spotify.com/authorize",
            token: "https://accounts.spotify.com/api/token",
        },
        scopes: &["user-read-email"],
        authentication: Authentication::Basic,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::Endpoint {
            url: "https://api.spotify.com/v1/me",
            headers: &[],
            proof: Proof::None,
            addresses: None,
        },
        claims: Claims::Fixed {
            subject: &["id"],
            email: Some("email"),
            verified: Verified::Never,
            name: &["display_name"],
        },
        check: Check::None,
        refusals: STANDARD,
    },
    // https://openid.net/specs/openid-connect-core-1_0.html, …/openid-connect-discovery-1_0.html; RFC 7662
    Preset {
        name: "oidc",
        server: Server::Discovered { issuer: Issuer::Option("issuer"), also: &[] },
        scopes: OIDC_SCOPES,
        authentication: Authentication::Discovered,
        pkce: true,
        nonce: true,
        form_post: false,
        parameters: &[],
        prompts: PROMPTS,
        login_hint: Some("login_hint"),
        profile: Profile::IdToken,
        claims: Claims::Given,
        check: Check::Discovered,
        refusals: STANDARD,
    },
    // RFC 6749, RFC 7662
    Preset {
        name: "oauth2",
        server: Server::Given,
        scopes: &[],
        authentication: Authentication::Given,
        pkce: true,
        nonce: false,
        form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: Profile::Given,
        claims: Claims::Given,
        check: Check::Given,
        refusals: STANDARD,
    },
];

/// None: a preset of a later version.
pub(super) fn preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

#[cfg(test)]
mod tests {
    use latchkey_crds::provider::ProviderClient;

    use super::*;

    #[test]
    fn every_member_of_the_resource_has_an_entry() {
        assert_eq!(PRESETS.each_ref().map(|preset| preset.name), ProviderClient::MEMBERS);
        assert!(preset("yahoo").is_none());
    }

    #[test]
    fn every_entry_is_whole() {
        for preset in &PRESETS {
            let name = preset.name;
            let is_oidc = matches!(preset.server, Server::Discovered { .. });
            assert_eq!(is_oidc, matches!(preset.profile, Profile::IdToken), "{name}");
            assert_eq!(is_oidc || name == "facebook", preset.scopes.contains(&"openid"), "{name}");
            assert!(is_oidc || !preset.nonce, "{name}: a nonce needs an ID token");
            assert_eq!(preset.pkce, name != "linkedin", "{name}");
            let form_post = preset.parameters.contains(&("response_mode", "form_post"));
            assert_eq!(form_post, preset.form_post, "{name}");
            let listed = matches!(&preset.profile, Profile::Endpoint { addresses: Some(_), .. });
            let from_list = matches!(&preset.claims, Claims::Fixed { verified: Verified::Listed, email: None, .. });
            assert_eq!(listed, from_list, "{name}");
        }
    }

    #[test]
    fn every_address_is_https() {
        for preset in &PRESETS {
            let text = format!("{preset:?}");
            assert!(!text.contains("http://"), "{}", preset.name);
        }
    }
}
