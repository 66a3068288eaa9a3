"""A web application that signs in users with Authlib."""

import os
from urllib.parse import urlencode

from authlib.integrations.flask_client import OAuth
from flask import Flask, jsonify, redirect

BASE_URL = os.environ["BASE_URL"]

app = Flask(__name__)
# Signs the cookie that carries the state of a login.
app.secret_key = "only-for-the-tests"
oauth = OAuth(app)
latchkey = oauth.register(
    "latchkey",
    client_id=os.environ["CLIENT_ID"],
    client_secret=os.environ["CLIENT_SECRET"],
    server_metadata_url=os.environ["ISSUER"] + "/.well-known/openid-configuration",
    client_kwargs={"scope": os.environ["SCOPES"], "code_challenge_method": "S256"},
)
# The user who is signed in: one at a time.
session = {}


@app.get("/")
def home():
    if not session:
        return jsonify(error="nobody is signed in"), 401
    return jsonify(session)


@app.get("/sign-in")
def sign_in():
    return latchkey.authorize_redirect(BASE_URL + "/callback")


@app.get("/callback")
def callback():
    token = latchkey.authorize_access_token()
    # Authlib has verified the ID token: these are its claims.
    open_session(token, token["userinfo"])
    return redirect("/")


@app.get("/refresh")
def refresh():
    token = latchkey.fetch_access_token(grant_type="refresh_token", refresh_token=session["refresh_token"])
    open_session(token, latchkey.parse_id_token(token, nonce=None))
    return jsonify(session)


@app.get("/userinfo")
def userinfo():
    token = {"access_token": session["access_token"], "token_type": "Bearer"}
    return jsonify(claims=latchkey.userinfo(token=token))


@app.get("/sign-out")
def sign_out():
    endpoint = latchkey.load_server_metadata()["end_session_endpoint"]
    query = urlencode({"id_token_hint": session["id_token"], "post_logout_redirect_uri": BASE_URL + "/signed-out"})
    session.clear()
    return redirect(endpoint + "?" + query)


@app.get("/signed-out")
def signed_out():
    return jsonify(signed_out=True)


def open_session(token, claims):
    refresh_token = token.get("refresh_token") or session["refresh_token"]
    session.update(
        claims=dict(claims),
        access_token=token["access_token"],
        refresh_token=refresh_token,
        id_token=token["id_token"],
    )


if __name__ == "__main__":
    app.run(host=os.environ["LISTEN_HOST"], port=int(os.environ["LISTEN_PORT"]))
