// A web application that signs in users with oauth4webapi. It pushes its authorization requests (RFC 9126).

import * as oauth from "oauth4webapi";

import { serve, settings } from "../application.mjs";

const issuer = new URL(settings.issuer);
const server = await oauth.processDiscoveryResponse(issuer, await oauth.discoveryRequest(issuer));
const client = { client_id: settings.clientID };
const authentication = oauth.ClientSecretPost(settings.clientSecret);

function session(tokens, before) {
  return {
    claims: oauth.getValidatedIdTokenClaims(tokens),
    access_token: tokens.access_token,
    refresh_token: tokens.refresh_token ?? before?.refresh_token,
    id_token: tokens.id_token,
  };
}

serve({
  async signIn() {
    const [state, nonce, verifier] =
      [oauth.generateRandomState(), oauth.generateRandomNonce(), oauth.generateRandomCodeVerifier()];
    const pushed = await oauth.pushedAuthorizationRequest(server, client, authentication, {
      response_type: "code",
      redirect_uri: settings.redirectURI,
      scope: settings.scope,
      state,
      nonce,
      code_challenge: await oauth.calculatePKCECodeChallenge(verifier),
      code_challenge_method: "S256",
    });
    const { request_uri } = await oauth.processPushedAuthorizationResponse(server, client, pushed);
    const url = new URL(server.authorization_endpoint);
    url.search = new URLSearchParams({ client_id: client.client_id, request_uri });
    return { url, state, nonce, verifier };
  },

  async callback(url, { state, nonce, verifier }) {
    const parameters = oauth.validateAuthResponse(server, client, url, state);
    const response = await oauth.authorizationCodeGrantRequest(
      server, client, authentication, parameters, settings.redirectURI, verifier,
    );
    const tokens = await oauth.processAuthorizationCodeResponse(server, client, response, {
      expectedNonce: nonce,
      requireIdToken: true,
    });
    await oauth.validateApplicationLevelSignature(server, response);
    return session(tokens);
  },

  async refresh(before) {
    const response = await oauth.refreshTokenGrantRequest(server, client, authentication, before.refresh_token);
    const tokens = await oauth.processRefreshTokenResponse(server, client, response);
    await oauth.validateApplicationLevelSignature(server, response);
    return session(tokens, before);
  },

  async userinfo({ access_token, claims }) {
    const response = await oauth.userInfoRequest(server, client, access_token);
    return oauth.processUserInfoResponse(server, client, claims.sub, response);
  },

  signOut({ id_token }) {
    const url = new URL(server.end_session_endpoint);
    url.search = new URLSearchParams({
      id_token_hint: id_token,
      post_logout_redirect_uri: settings.postLogoutRedirectURI,
    });
    return url;
  },
});
