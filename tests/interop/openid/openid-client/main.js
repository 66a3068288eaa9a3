// A web application that signs in users with openid-client.

import * as client from "openid-client";

import { serve, settings } from "../application.mjs";

const authentication = client.ClientSecretBasic(settings.clientSecret);
const config = await client.discovery(new URL(settings.issuer), settings.clientID, undefined, authentication);
// Verifies the signature of each ID token, too.
client.enableNonRepudiationChecks(config);

function session(tokens, before) {
  return {
    claims: tokens.claims(),
    access_token: tokens.access_token,
    refresh_token: tokens.refresh_token ?? before?.refresh_token,
    id_token: tokens.id_token,
  };
}

serve({
  async signIn() {
    const [state, nonce, verifier] = [client.randomState(), client.randomNonce(), client.randomPKCECodeVerifier()];
    const url = client.buildAuthorizationUrl(config, {
      redirect_uri: settings.redirectURI,
      scope: settings.scope,
      state,
      nonce,
      code_challenge: await client.calculatePKCECodeChallenge(verifier),
      code_challenge_method: "S256",
    });
    return { url, state, nonce, verifier };
  },

  async callback(url, { state, nonce, verifier }) {
    return session(await client.authorizationCodeGrant(config, url, {
      expectedState: state,
      expectedNonce: nonce,
      pkceCodeVerifier: verifier,
      idTokenExpected: true,
    }));
  },

  async refresh(before) {
    return session(await client.refreshTokenGrant(config, before.refresh_token), before);
  },

  userinfo: ({ access_token, claims }) => client.fetchUserInfo(config, access_token, claims.sub),

  signOut: ({ id_token }) => client.buildEndSessionUrl(config, {
    id_token_hint: id_token,
    post_logout_redirect_uri: settings.postLogoutRedirectURI,
  }),
});
