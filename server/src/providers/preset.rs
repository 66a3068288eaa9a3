//! Presets: one table entry for each known provider, from the provider's own documentation.
//!
//! A claim name that begins with `/` is a JSON pointer (RFC 6901). Any other claim name is the name of a member.

/// The properties of a provider.
#[derive(Debug)]
pub(super) struct Preset {
    pub(super) name: &'static str,
    pub(super) endpoints: EndpointSource,
    pub(super) scopes: &'static [&'static str],
    pub(super) authentication: ClientAuthenticationMethod,
    /// Whether flows use PKCE (RFC 7636). False only if flows with PKCE fail at the provider (docs/decisions/0020).
    pub(super) uses_pkce: bool,
    /// Whether the ID token contains the nonce of the authorization request.
    pub(super) supports_nonce: bool,
    /// Whether the callback is a POST (`response_mode=form_post`).
    pub(super) uses_form_post: bool,
    /// Additional parameters of the authorization URL.
    pub(super) parameters: &'static [(&'static str, &'static str)],
    /// The supported values of `prompt`.
    pub(super) prompts: &'static [&'static str],
    /// The name of the provider's parameter for `login_hint`, if the provider has such a parameter.
    pub(super) login_hint: Option<&'static str>,
    pub(super) profile: ProfileSource,
    pub(super) claims: ClaimNames,
    pub(super) check: TokenCheck,
    /// The provider's own error codes at the token endpoint.
    pub(super) error_codes: ErrorCodes,
}

/// The source of the endpoints.
#[derive(Debug)]
pub(super) enum EndpointSource {
    /// The issuer's discovery document (OpenID Connect Discovery 1.0).
    Discovered {
        issuer: IssuerSource,
        /// Other names of the issuer: the discovery document and `iss` can contain them. The authority of an identity
        /// is always the issuer, never an alias.
        aliases: &'static [&'static str],
    },
    Fixed {
        /// The authority of the identities consists of the preset's name and this URL.
        base_url: &'static str,
        /// The `iss` in callbacks (RFC 9207), if the provider documents it.
        issuer: Option<&'static str>,
        authorization: &'static str,
        token: &'static str,
    },
    /// The URLs in the Provider resource: `authorizationURL`, `tokenURL`, `userInfoURL` and `introspectionURL`.
    Configured,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IssuerSource {
    Fixed(&'static str),
    /// The issuer is the value of this option of the Provider.
    Option(&'static str),
    /// Microsoft: depends on the option `tenant`. For some tenants, the issuer in the discovery document is a template.
    MicrosoftTenant,
}

/// Client authentication at the token endpoint (RFC 6749, 2.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientAuthenticationMethod {
    Basic,
    Post,
    /// Basic if the discovery document lists it or has no list of methods. Otherwise Post.
    Discovered,
    /// The method in `clientAuthentication` of the Provider resource.
    Configured,
    /// Like [`Self::Post`], but the client secret is a JWT that the server signs with the private key from Apple.
    AppleKey,
}

/// The source of the user's identity.
#[derive(Debug)]
pub(super) enum ProfileSource {
    /// The ID token and, for claims that it lacks, the userinfo endpoint of the discovery document.
    IdToken,
    Endpoint {
        url: &'static str,
        headers: &'static [(&'static str, &'static str)],
        proof: ProfileCredential,
        /// If set, the user's email address comes from this list, not from the profile.
        addresses: Option<AddressList>,
    },
    /// The endpoint in `userInfoURL` of the Provider resource.
    Configured,
}

/// What a profile endpoint requires in addition to the access token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProfileCredential {
    None,
    /// Facebook: `appsecret_proof`, an HMAC-SHA-256 of the access token, with the client secret as the key.
    AppSecret,
    /// Twitch: the client ID in the header `Client-Id`.
    ClientId,
}

/// An endpoint with a list of the user's email addresses. Only the primary email address is used.
#[derive(Debug)]
pub(super) struct AddressList {
    pub(super) url: &'static str,
    /// A JSON pointer to the list. Empty if the list is the whole response.
    pub(super) list: &'static str,
    /// In each list entry, the claim that contains the email address.
    pub(super) address: &'static str,
    /// The claim that is `true` in the entry of the primary email address.
    pub(super) primary: &'static str,
    /// The claim that is `true` if the email address is verified.
    pub(super) verified: &'static str,
}

/// The names of the claims.
#[derive(Debug)]
pub(super) enum ClaimNames {
    Fixed {
        /// If there are several claims, their values are joined with hyphens, because a single value is not unique.
        subject: &'static [&'static str],
        email: Option<&'static str>,
        verified: EmailVerificationSource,
        /// The claims that can contain the user's name. The first of them with a valid name is used.
        name: &'static [&'static str],
    },
    /// The names in `claims` of the Provider resource.
    Configured,
}

/// How the provider shows that an email address is verified (specification: Social login, Identities).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmailVerificationSource {
    /// The provider does not show whether an email address is verified, so no email address counts as verified.
    Never,
    /// The documentation says that the provider returns only verified email addresses.
    Documented,
    /// The email address is verified if this claim is `true`.
    Claim(&'static str),
    /// The email address is verified if this claim is `true` or 1.
    ClaimOrNumberOne(&'static str),
    /// The primary email address is verified if its member [`AddressList::verified`] is `true`.
    AddressList,
}

/// How the provider shows to which client an access token was issued. ID tokens need no such check.
#[derive(Debug)]
pub(super) enum TokenCheck {
    /// The provider offers no check.
    None,
    Endpoint {
        method: CheckMethod,
        /// The URL of the endpoint, in which the client ID replaces `{client_id}`.
        url: &'static str,
        token: TokenLocation,
        authentication: CheckAuthentication,
        /// A member of the response that must be `true`.
        valid_member: Option<&'static str>,
        /// Members of the response that contain a client ID. At least one must be present. Each member that is present
        /// must contain one of our client IDs.
        client_id_members: &'static [&'static str],
        /// A member of the response that must equal the profile's subject.
        subject: Option<&'static str>,
        /// Statuses that mean that the token is not valid.
        invalid_token_statuses: &'static [u16],
        /// Whether the endpoint accepts only tokens that were issued to `clientID`, not to `additionalClientIDs`.
        own_tokens_only: bool,
    },
    /// Introspection (RFC 7662) at the `introspection_endpoint`, if the discovery document names one.
    Discovered,
    /// Introspection (RFC 7662) at the `introspectionURL`, if the Provider has one.
    Configured,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckMethod {
    Get,
    Post,
}

/// The part of the request that contains the token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenLocation {
    Query(&'static str),
    Form(&'static str),
    Json(&'static str),
    /// In the header `Authorization`, with this scheme.
    Header(&'static str),
}

/// Client authentication in the request that checks a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckAuthentication {
    /// No authentication.
    None,
    Basic,
    Form,
    /// Facebook: `access_token=id|secret` in the query.
    AppToken,
}

/// A provider's own error codes at the token endpoint.
#[derive(Debug)]
pub(super) struct ErrorCodes {
    /// The error codes for a wrong authorization code, in addition to `invalid_grant`.
    pub(super) invalid_code: &'static [&'static str],
    /// The error codes for an unknown client or a wrong secret, in addition to `invalid_client` and
    /// `unauthorized_client`.
    pub(super) invalid_client: &'static [&'static str],
}

const STANDARD_ERROR_CODES: ErrorCodes = ErrorCodes { invalid_code: &[], invalid_client: &[] };

/// The values of `prompt` (OpenID Connect Core 1.0, 3.1.2.1).
const OIDC_PROMPTS: &[&str] = &["none", "login", "consent", "select_account"];

const OIDC_SCOPES: &[&str] = &["openid", "email", "profile"];

const OIDC_CLAIMS: ClaimNames = ClaimNames::Fixed {
    subject: &["sub"],
    email: Some("email"),
    verified: EmailVerificationSource::Claim("email_verified"),
    name: &["name"],
};

/// Every preset, in the order of `ProviderClient::MEMBER_NAMES`.
pub(super) static PRESETS: [Preset; 15] = [
    // https://developers.google.com/identity/openid-connect/openid-connect (parameters, `iss`, `email_verified`);
    // https://developers.google.com/identity/sign-in/web/backend-auth (tokens of other clients, tokeninfo)
    Preset {
        name: "google",
        endpoints: EndpointSource::Discovered {
            issuer: IssuerSource::Fixed("https://accounts.google.com"),
            aliases: &["accounts.google.com"],
        },
        scopes: OIDC_SCOPES,
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: true,
        uses_form_post: false,
        parameters: &[],
        prompts: &["none", "consent", "select_account"],
        login_hint: Some("login_hint"),
        profile: ProfileSource::IdToken,
        claims: OIDC_CLAIMS,
        check: TokenCheck::Endpoint {
            method: CheckMethod::Get,
            url: "https://oauth2.googleapis.com/tokeninfo",
            token: TokenLocation::Query("access_token"),
            authentication: CheckAuthentication::None,
            valid_member: None,
            client_id_members: &["aud", "azp"],
            subject: Some("sub"),
            invalid_token_statuses: &[400],
            own_tokens_only: false,
        },
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://developer.apple.com/documentation/signinwithapplerestapi (`response_mode`, client secret, `user`);
    // https://developer.apple.com/documentation/signinwithapple/authenticating-users-with-sign-in-with-apple (claims)
    Preset {
        name: "apple",
        endpoints: EndpointSource::Discovered {
            issuer: IssuerSource::Fixed("https://appleid.apple.com"),
            aliases: &[],
        },
        scopes: &["openid", "email", "name"],
        authentication: ClientAuthenticationMethod::AppleKey,
        uses_pkce: true,
        supports_nonce: true,
        uses_form_post: true,
        parameters: &[("response_mode", "form_post")],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::IdToken,
        claims: OIDC_CLAIMS,
        check: TokenCheck::None,
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://docs.github.com/en/apps/oauth-apps/building-oauth-apps/authorizing-oauth-apps (flow, PKCE, `prompt`,
    // `login`); https://docs.github.com/en/rest/users/emails (primary, verified);
    // https://docs.github.com/en/rest/apps/oauth-applications#check-a-token
    Preset {
        name: "github",
        endpoints: EndpointSource::Fixed {
            base_url: "https://github.com",
            issuer: Some("https://github.com/login/oauth"),
            authorization: "https://github.com/login/oauth/authorize",
            token: "https://github.com/login/oauth/access_token",
        },
        scopes: &["read:user", "user:email"],
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &["select_account"],
        login_hint: Some("login"),
        profile: ProfileSource::Endpoint {
            url: "https://api.github.com/user",
            headers: &[("accept", "application/vnd.github+json"), ("x-github-api-version", "2022-11-28")],
            proof: ProfileCredential::None,
            addresses: Some(AddressList {
                url: "https://api.github.com/user/emails?per_page=100",
                list: "",
                address: "email",
                primary: "primary",
                verified: "verified",
            }),
        },
        claims: ClaimNames::Fixed {
            subject: &["id"],
            email: None,
            verified: EmailVerificationSource::AddressList,
            name: &["name", "login"],
        },
        check: TokenCheck::Endpoint {
            method: CheckMethod::Post,
            url: "https://api.github.com/applications/{client_id}/token",
            token: TokenLocation::Json("access_token"),
            authentication: CheckAuthentication::Basic,
            valid_member: None,
            client_id_members: &["/app/client_id"],
            subject: Some("/user/id"),
            invalid_token_statuses: &[404, 422],
            own_tokens_only: true,
        },
        error_codes: ErrorCodes {
            invalid_code: &["bad_verification_code"],
            invalid_client: &["incorrect_client_credentials"],
        },
    },
    // https://docs.gitlab.com/integration/openid_connect_provider/ (claims);
    // https://docs.gitlab.com/api/oauth2/ (flow, PKCE)
    Preset {
        name: "gitlab",
        endpoints: EndpointSource::Discovered { issuer: IssuerSource::Option("baseURL"), aliases: &[] },
        scopes: OIDC_SCOPES,
        authentication: ClientAuthenticationMethod::Discovered,
        uses_pkce: true,
        supports_nonce: true,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::IdToken,
        claims: OIDC_CLAIMS,
        check: TokenCheck::Discovered,
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://learn.microsoft.com/entra/identity-platform/v2-oauth2-auth-code-flow (parameters);
    // https://learn.microsoft.com/entra/identity-platform/access-tokens#validate-the-issuer (templates, key issuers);
    // https://learn.microsoft.com/entra/identity-platform/optional-claims-reference (`xms_edov`)
    Preset {
        name: "microsoft",
        endpoints: EndpointSource::Discovered { issuer: IssuerSource::MicrosoftTenant, aliases: &[] },
        scopes: OIDC_SCOPES,
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: true,
        uses_form_post: false,
        parameters: &[],
        prompts: OIDC_PROMPTS,
        login_hint: Some("login_hint"),
        profile: ProfileSource::IdToken,
        claims: ClaimNames::Fixed {
            subject: &["sub"],
            email: Some("email"),
            // `email` can be any text that a tenant's administrator entered.
            verified: EmailVerificationSource::ClaimOrNumberOne("xms_edov"),
            name: &["name"],
        },
        check: TokenCheck::None,
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://developers.facebook.com/docs/facebook-login/guides/advanced/manual-flow (flow, debug_token);
    // https://developers.facebook.com/docs/facebook-login/guides/advanced/oidc-token (PKCE needs the scope `openid`:
    // without this scope, the dialog drops the challenge, and the token endpoint rejects the verifier);
    // https://developers.facebook.com/docs/graph-api/reference/user (`email`: not documented as verified);
    // https://developers.facebook.com/docs/graph-api/guides/secure-requests (`appsecret_proof`).
    // Facebook's ID token is ignored, because the profile has more claims. The profile is read with the access token of
    // the same response.
    Preset {
        name: "facebook",
        endpoints: EndpointSource::Fixed {
            base_url: "https://www.facebook.com",
            issuer: None,
            authorization: "https://www.facebook.com/v24.0/dialog/oauth",
            token: "https://graph.facebook.com/v24.0/oauth/access_token",
        },
        scopes: &["openid", "email", "public_profile"],
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::Endpoint {
            url: "https://graph.facebook.com/v24.0/me?fields=id,name,email",
            headers: &[],
            proof: ProfileCredential::AppSecret,
            addresses: None,
        },
        claims: ClaimNames::Fixed {
            subject: &["id"],
            email: Some("email"),
            verified: EmailVerificationSource::Never,
            name: &["name"],
        },
        check: TokenCheck::Endpoint {
            method: CheckMethod::Get,
            url: "https://graph.facebook.com/v24.0/debug_token",
            token: TokenLocation::Query("input_token"),
            authentication: CheckAuthentication::AppToken,
            valid_member: Some("/data/is_valid"),
            client_id_members: &["/data/app_id"],
            subject: Some("/data/user_id"),
            invalid_token_statuses: &[400],
            own_tokens_only: true,
        },
        error_codes: ErrorCodes { invalid_code: &["100"], invalid_client: &["1", "101"] },
    },
    // https://docs.discord.com/developers/topics/oauth2 (flow, `prompt`, `/oauth2/@me`);
    // https://docs.discord.com/developers/resources/user (`verified`, `global_name`)
    Preset {
        name: "discord",
        endpoints: EndpointSource::Fixed {
            base_url: "https://discord.com",
            issuer: None,
            authorization: "https://discord.com/oauth2/authorize",
            token: "https://discord.com/api/oauth2/token",
        },
        scopes: &["identify", "email"],
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &["none", "consent"],
        login_hint: None,
        profile: ProfileSource::Endpoint {
            url: "https://discord.com/api/v10/users/@me",
            headers: &[],
            proof: ProfileCredential::None,
            addresses: None,
        },
        claims: ClaimNames::Fixed {
            subject: &["id"],
            email: Some("email"),
            verified: EmailVerificationSource::Claim("verified"),
            name: &["global_name", "username"],
        },
        check: TokenCheck::Endpoint {
            method: CheckMethod::Get,
            url: "https://discord.com/api/v10/oauth2/@me",
            token: TokenLocation::Header("Bearer"),
            authentication: CheckAuthentication::None,
            valid_member: None,
            client_id_members: &["/application/id"],
            subject: Some("/user/id"),
            invalid_token_statuses: &[401],
            own_tokens_only: false,
        },
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://learn.microsoft.com/linkedin/consumer/integrations/self-serve/sign-in-with-linkedin-v2 (claims, `iss`);
    // https://learn.microsoft.com/linkedin/shared/authentication/token-introspection.
    // Flows have no nonce, because the ID token does not contain it. Flows do not use PKCE, because the token endpoint
    // rejects a client that sends a verifier (`invalid_client`).
    Preset {
        name: "linkedin",
        endpoints: EndpointSource::Discovered {
            issuer: IssuerSource::Fixed("https://www.linkedin.com/oauth"),
            aliases: &["https://www.linkedin.com"],
        },
        scopes: OIDC_SCOPES,
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: false,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::IdToken,
        claims: OIDC_CLAIMS,
        check: TokenCheck::Endpoint {
            method: CheckMethod::Post,
            url: "https://www.linkedin.com/oauth/v2/introspectToken",
            token: TokenLocation::Form("token"),
            authentication: CheckAuthentication::Form,
            valid_member: Some("active"),
            client_id_members: &["client_id"],
            subject: None,
            invalid_token_statuses: &[400],
            own_tokens_only: true,
        },
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://docs.x.com/fundamentals/authentication/oauth-2-0/authorization-code (confidential client, PKCE);
    // https://docs.x.com/x-api/users/get-my-user (`confirmed_email`, with the scope `users.email`)
    Preset {
        name: "x",
        endpoints: EndpointSource::Fixed {
            base_url: "https://x.com",
            issuer: None,
            authorization: "https://x.com/i/oauth2/authorize",
            token: "https://api.x.com/2/oauth2/token",
        },
        scopes: &["users.read", "tweet.read", "users.email"],
        authentication: ClientAuthenticationMethod::Basic,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::Endpoint {
            url: "https://api.x.com/2/users/me?user.fields=confirmed_email",
            headers: &[],
            proof: ProfileCredential::None,
            addresses: None,
        },
        claims: ClaimNames::Fixed {
            subject: &["/data/id"],
            email: Some("/data/confirmed_email"),
            verified: EmailVerificationSource::Documented,
            name: &["/data/name", "/data/username"],
        },
        check: TokenCheck::None,
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://docs.slack.dev/authentication/sign-in-with-slack (flow, claims; user IDs are unique per team only);
    // https://docs.slack.dev/reference/methods/openid.connect.token (`code_verifier`).
    Preset {
        name: "slack",
        endpoints: EndpointSource::Discovered { issuer: IssuerSource::Fixed("https://slack.com"), aliases: &[] },
        scopes: OIDC_SCOPES,
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: true,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::IdToken,
        claims: ClaimNames::Fixed {
            subject: &["https://slack.com/team_id", "sub"],
            email: Some("email"),
            verified: EmailVerificationSource::Claim("email_verified"),
            name: &["name"],
        },
        check: TokenCheck::None,
        error_codes: ErrorCodes {
            invalid_code: &["invalid_code", "code_already_used"],
            invalid_client: &["invalid_client_id", "bad_client_secret"],
        },
    },
    // https://support.atlassian.com/bitbucket-cloud/docs/use-oauth-on-bitbucket-cloud/ (flow);
    // https://developer.atlassian.com/cloud/bitbucket/rest/api-group-users/ (`is_primary`, `is_confirmed`)
    Preset {
        name: "bitbucket",
        endpoints: EndpointSource::Fixed {
            base_url: "https://bitbucket.org",
            issuer: None,
            authorization: "https://bitbucket.org/site/oauth2/authorize",
            token: "https://bitbucket.org/site/oauth2/access_token",
        },
        scopes: &["account", "email"],
        authentication: ClientAuthenticationMethod::Basic,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::Endpoint {
            url: "https://api.bitbucket.org/2.0/user",
            headers: &[],
            proof: ProfileCredential::None,
            addresses: Some(AddressList {
                url: "https://api.bitbucket.org/2.0/user/emails?pagelen=100",
                list: "/values",
                address: "email",
                primary: "is_primary",
                verified: "is_confirmed",
            }),
        },
        claims: ClaimNames::Fixed {
            subject: &["uuid"],
            email: None,
            verified: EmailVerificationSource::AddressList,
            name: &["display_name", "nickname"],
        },
        check: TokenCheck::None,
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://dev.twitch.tv/docs/authentication/getting-tokens-oauth/ (flow), …/authentication/validate-tokens/;
    // https://dev.twitch.tv/docs/api/reference/#get-users (`email`: "the user's verified email address")
    Preset {
        name: "twitch",
        endpoints: EndpointSource::Fixed {
            base_url: "https://www.twitch.tv",
            issuer: None,
            authorization: "https://id.twitch.tv/oauth2/authorize",
            token: "https://id.twitch.tv/oauth2/token",
        },
        scopes: &["user:read:email"],
        authentication: ClientAuthenticationMethod::Post,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::Endpoint {
            url: "https://api.twitch.tv/helix/users",
            headers: &[],
            proof: ProfileCredential::ClientId,
            addresses: None,
        },
        claims: ClaimNames::Fixed {
            subject: &["/data/0/id"],
            email: Some("/data/0/email"),
            verified: EmailVerificationSource::Documented,
            name: &["/data/0/display_name", "/data/0/login"],
        },
        check: TokenCheck::Endpoint {
            method: CheckMethod::Get,
            url: "https://id.twitch.tv/oauth2/validate",
            token: TokenLocation::Header("OAuth"),
            authentication: CheckAuthentication::None,
            valid_member: None,
            client_id_members: &["client_id"],
            subject: Some("user_id"),
            invalid_token_statuses: &[401],
            own_tokens_only: false,
        },
        error_codes: ErrorCodes {
            invalid_code: &["Invalid authorization code"],
            invalid_client: &["invalid client", "invalid client secret"],
        },
    },
    // https://developer.spotify.com/documentation/web-api/tutorials/code-flow (flow);
    // https://developer.spotify.com/documentation/web-api/reference/get-current-users-profile (`email` is unverified)
    Preset {
        name: "spotify",
        endpoints: EndpointSource::Fixed {
            base_url: "https://accounts.spotify.com",
            issuer: None,
            authorization: "https://accounts.spotify.com/authorize",
            token: "https://accounts.spotify.com/api/token",
        },
        scopes: &["user-read-email"],
        authentication: ClientAuthenticationMethod::Basic,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::Endpoint {
            url: "https://api.spotify.com/v1/me",
            headers: &[],
            proof: ProfileCredential::None,
            addresses: None,
        },
        claims: ClaimNames::Fixed {
            subject: &["id"],
            email: Some("email"),
            verified: EmailVerificationSource::Never,
            name: &["display_name"],
        },
        check: TokenCheck::None,
        error_codes: STANDARD_ERROR_CODES,
    },
    // https://openid.net/specs/openid-connect-core-1_0.html, …/openid-connect-discovery-1_0.html; RFC 7662
    Preset {
        name: "oidc",
        endpoints: EndpointSource::Discovered { issuer: IssuerSource::Option("issuer"), aliases: &[] },
        scopes: OIDC_SCOPES,
        authentication: ClientAuthenticationMethod::Discovered,
        uses_pkce: true,
        supports_nonce: true,
        uses_form_post: false,
        parameters: &[],
        prompts: OIDC_PROMPTS,
        login_hint: Some("login_hint"),
        profile: ProfileSource::IdToken,
        claims: ClaimNames::Configured,
        check: TokenCheck::Discovered,
        error_codes: STANDARD_ERROR_CODES,
    },
    // RFC 6749, RFC 7662
    Preset {
        name: "oauth2",
        endpoints: EndpointSource::Configured,
        scopes: &[],
        authentication: ClientAuthenticationMethod::Configured,
        uses_pkce: true,
        supports_nonce: false,
        uses_form_post: false,
        parameters: &[],
        prompts: &[],
        login_hint: None,
        profile: ProfileSource::Configured,
        claims: ClaimNames::Configured,
        check: TokenCheck::Configured,
        error_codes: STANDARD_ERROR_CODES,
    },
];

/// Finds a preset. Returns `None` if it is unknown, for example because it is a preset of a later version.
pub(super) fn find_preset(name: &str) -> Option<&'static Preset> {
    PRESETS.iter().find(|preset| preset.name == name)
}

#[cfg(test)]
mod tests {
    use latchkey_crds::provider::ProviderClient;

    use super::*;

    #[test]
    fn every_member_of_the_provider_resource_has_a_preset() {
        assert_eq!(PRESETS.each_ref().map(|preset| preset.name), ProviderClient::MEMBER_NAMES);
        assert!(find_preset("yahoo").is_none());
    }

    #[test]
    fn every_preset_is_consistent() {
        for preset in &PRESETS {
            let name = preset.name;
            let is_oidc = matches!(preset.endpoints, EndpointSource::Discovered { .. });
            assert_eq!(is_oidc, matches!(preset.profile, ProfileSource::IdToken), "{name}");
            assert_eq!(is_oidc || name == "facebook", preset.scopes.contains(&"openid"), "{name}");
            assert!(is_oidc || !preset.supports_nonce, "{name}: a nonce needs an ID token");
            assert_eq!(preset.uses_pkce, name != "linkedin", "{name}");
            let requests_form_post = preset.parameters.contains(&("response_mode", "form_post"));
            assert_eq!(requests_form_post, preset.uses_form_post, "{name}");
            let has_address_list = matches!(&preset.profile, ProfileSource::Endpoint { addresses: Some(_), .. });
            let reads_address_list = matches!(
                &preset.claims,
                ClaimNames::Fixed { verified: EmailVerificationSource::AddressList, email: None, .. }
            );
            assert_eq!(has_address_list, reads_address_list, "{name}");
        }
    }

    #[test]
    fn every_url_is_https() {
        for preset in &PRESETS {
            let text = format!("{preset:?}");
            assert!(!text.contains("http://"), "{}", preset.name);
        }
    }
}
