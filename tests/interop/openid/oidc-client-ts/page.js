// A single-page application that signs in users with oidc-client-ts. The test calls the functions of `program`.
"use strict";

/** Sets the text that the test waits for. */
function show(text) {
  document.getElementById("state").textContent = text;
}

async function start() {
  const settings = await (await fetch("/settings.json")).json();
  const manager = new oidc.UserManager({
    ...settings,
    userStore: new oidc.WebStorageStateStore({ store: sessionStorage }),
    automaticSilentRenew: false,
  });

  async function signedIn() {
    const user = await manager.getUser();
    return user && { claims: user.profile, access_token: user.access_token, id_token: user.id_token };
  }

  window.program = {
    signedIn,
    signIn: () => manager.signinRedirect(),
    refresh: async () => { await manager.signinSilent(); return signedIn(); },
    userinfo: async () => {
      const endpoint = await manager.metadataService.getUserInfoEndpoint();
      const { access_token } = await manager.getUser();
      return (await fetch(endpoint, { headers: { Authorization: `Bearer ${access_token}` } })).json();
    },
    signOut: () => manager.signoutRedirect(),
  };

  if (location.pathname === "/callback") {
    await manager.signinCallback();
    location.replace("/");
  } else {
    show(location.pathname === "/signed-out" ? "signed out" : "the program is loaded");
  }
}

start().catch(error => show(`failed: ${error}`));
