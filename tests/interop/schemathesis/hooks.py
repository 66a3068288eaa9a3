"""What schemathesis cannot know: the media type of imports and exports, and values that the service has issued.

The public API needs the token of a user, and many calls end it: they log out, change the password or delete the user. So
each call gets the token of a user that still exists (`current_account`). Most calls would also stop at a made-up id,
password or code, so `supply_values` replaces a part of them with real ones, only in requests that must be valid.
"""

import base64
import hashlib
import json
import os
import random
import secrets
import time
import uuid
from urllib.parse import parse_qsl, urlencode, urlsplit

import jsonschema_rs
import requests
import schemathesis
from schemathesis import GenerationMode

ADMIN_URL = os.environ["LATCHKEY_ADMIN_URL"] + "/v1/shop"
PUBLIC_URL = os.environ["LATCHKEY_PUBLIC_URL"]
APP_URL = PUBLIC_URL + "/v1/shop"
# The inbox of `make run`. Without it, no call has a code from a mail.
INBOX_URL = os.environ.get("LATCHKEY_INBOX_URL")
ADMINISTRATOR = {"Authorization": "Bearer " + os.environ["LATCHKEY_TOKEN"]}
NDJSON = "application/x-ndjson"
# The redirect URL of the App in manifests/shop.yaml. An `http` loopback address can have any port.
REDIRECT_URL = "http://127.0.0.1:8025/done"
TIMEOUT = 30
# Some calls require a login in the last five minutes.
MAX_AGE = 240
# The users and the client of the provider of `make run` (tests/src/dev/provider.rs, tests/examples/local.yaml). One user
# logs in, so the identity of the other one can be linked to an account.
LOGIN_USER = "ada@example.com"
LINK_USER = "grace@example.com"
PROVIDER_PASSWORD = "open-sesame"
PROVIDER_CLIENT = ("shop", "only-for-the-provider-of-make-run")

# Makes the same choices in each run with the same seed.
chooser = random.Random(os.environ["SEED"])


# --- Accounts ---


class Account:
    """A user with a verified address, a password, an identity, and a session."""

    def __init__(self):
        unique = uuid.uuid4().hex
        self.email = f"{unique}@example.com"
        self.password = new_password()
        self.has_identity = True
        self.created = time.monotonic()
        user = {
            "email": self.email,
            "email_verified": True,
            "name": "Ada",
            "password": self.password,
            "identities": [{"provider": "local", "subject": unique}],
        }
        self.id = send("POST", f"{ADMIN_URL}/users", headers=ADMINISTRATOR, json=user).json()["id"]
        session = self.log_in()
        self.token, self.refresh_token = session["token"], session["refresh_token"]

    def log_in(self):
        credentials = {"email": self.email, "password": self.password}
        return send("POST", f"{APP_URL}/email/login", json=credentials).json()

    def is_alive(self):
        response = requests.get(f"{APP_URL}/user", headers=self.authorization(), timeout=TIMEOUT)
        return response.status_code == 200

    def authorization(self):
        return {"Authorization": f"Bearer {self.token}"}


class Accounts:
    # The account of the next calls. `None`: the next call needs a new account.
    current = None
    # Whether a call since the last check may have ended the session or changed the password.
    is_doubtful = False
    # The values of `Authorization` that calls have got. A case can be generated long before it is sent.
    issued = set()


def current_account():
    account = Accounts.current
    if account and Accounts.is_doubtful and not account.is_alive():
        account = None
    if not account or time.monotonic() - account.created > MAX_AGE:
        account = Account()
    Accounts.current, Accounts.is_doubtful = account, False
    Accounts.issued.add(account.authorization()["Authorization"])
    return account


def send(method, url, **arguments):
    response = requests.request(method, url, timeout=TIMEOUT, **arguments)
    if not response.ok:
        raise RuntimeError(f"test data: {method} {url} is {response.status_code}: {response.text}")
    return response


def new_email():
    return f"{uuid.uuid4().hex}@example.com"


def new_password():
    return f"a quiet harbour at noon {chooser.getrandbits(64):x}"


def operation_id(operation):
    return operation.definition.raw.get("operationId")


def accepts(operation, scheme):
    return any(scheme in requirement for requirement in operation.definition.raw.get("security", []))


# schemathesis ignores these two classes if its settings have a section `auth`. They do not cache, because the session
# of a cached token could have ended.
@schemathesis.auth(refresh_interval=None).apply_to(lambda context: accepts(context.operation, "bearer"))
class AccessToken:
    def get(self, case, context):
        return current_account().authorization()

    def set(self, case, data, context):
        case.headers.update(data)


@schemathesis.auth(refresh_interval=None).apply_to(lambda context: accepts(context.operation, "serviceAccount"))
class ServiceAccount:
    def get(self, case, context):
        return ADMINISTRATOR

    def set(self, case, data, context):
        case.headers.update(data)


@schemathesis.hook
def after_call(context, case, response):
    if case.method == "GET" or not 200 <= response.status_code < 300:
        return
    Accounts.is_doubtful = True
    # After these calls, the session can still be valid, but this script has the old password or the old token.
    if operation_id(case.operation) in ("change-password", "confirm", "confirm-password", "change-user", "token"):
        Accounts.current = None
    if operation_id(case.operation) in ("unlink-identity", "remove-identity") and Accounts.current:
        Accounts.current.has_identity = False


# --- Values that the service has issued ---


def with_identity():
    account = current_account()
    if not account.has_identity:
        Accounts.current = None
        account = current_account()
    return account


def mailed_code(request, **arguments):
    """The address and the code of the mail that this call causes, or `None` without an inbox."""
    if not INBOX_URL:
        return None
    address = new_email() if request == "register" else current_account().email
    latest = requests.get(f"{INBOX_URL}/api/messages/latest", timeout=TIMEOUT)
    after = latest.json()["id"] if latest.ok else 0
    send("POST", f"{APP_URL}/email/{request}", json={"email": address, **arguments})
    query = {"to": address, "after": after, "wait": 20}
    return address, send("GET", f"{INBOX_URL}/api/messages/latest", params=query).json()["code"]


def confirmation():
    mail = mailed_code("register", name="Ada", password=new_password())
    return {"code": mail[1]} if mail else {}


def password_reset():
    mail = mailed_code("forgot-password")
    return {"email": mail[0], "code": mail[1], "password": new_password()} if mail else {}


def log_in_at_provider(url, user):
    """Logs in on the provider's page. Returns the query of the redirect to the application, without opening it."""
    with requests.Session() as browser:
        page = browser.get(url, timeout=TIMEOUT)
        form = {"login": user, "password": PROVIDER_PASSWORD}
        response = browser.post(page.url, data=form, allow_redirects=False, timeout=TIMEOUT)
    return dict(parse_qsl(urlsplit(response.headers["Location"]).query))


def start_flow(**query):
    """The provider's authorization URL, and the cookie that binds the flow to the browser."""
    response = send("GET", f"{PUBLIC_URL}/shop/local/redirect", params=query, allow_redirects=False)
    return response.headers["Location"], response.cookies.get_dict()


def finish_flow(case):
    """The query or form of a callback. Its cookie goes into the case."""
    url, case.cookies = start_flow()
    return log_in_at_provider(url, LOGIN_USER)


def code_grant():
    """The grant for a code that a social login returned."""
    verifier = secrets.token_urlsafe(32)
    digest = hashlib.sha256(verifier.encode()).digest()
    challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    url, cookies = start_flow(code_challenge=challenge, redirect_url=REDIRECT_URL)
    query = log_in_at_provider(url, LOGIN_USER)
    arguments = {"params": query, "cookies": cookies, "allow_redirects": False}
    response = send("GET", f"{PUBLIC_URL}/shop/local/callback", **arguments)
    code = dict(parse_qsl(urlsplit(response.headers["Location"]).query))["code"]
    grant = {"grant_type": "authorization_code", "code": code, "code_verifier": verifier}
    return grant | ({"redirect_url": REDIRECT_URL} if chooser.random() < 0.5 else {})


def authorization_request():
    """A valid authorization request of the client in tests/examples/demo.yaml."""
    return {
        "client_id": "demo",
        "response_type": "code",
        "redirect_uri": "http://127.0.0.1:8025/signed-in",
        "scope": "openid email",
        "code_challenge": secrets.token_urlsafe(32),
        "code_challenge_method": "S256",
    }


def refresh_grant():
    return {"grant_type": "refresh_token", "refresh_token": current_account().refresh_token}


def provider_token(user):
    """An ID token that the provider has issued to a client of the App, as its SDK gets it."""
    parts = urlsplit(start_flow()[0])
    query = dict(parse_qsl(parts.query))
    # Without `code_challenge`, because only the service knows its verifier.
    wanted = {name: query[name] for name in ("client_id", "redirect_uri", "response_type", "scope")}
    code = log_in_at_provider(parts._replace(query=urlencode(wanted)).geturl(), user)["code"]
    grant = {"grant_type": "authorization_code", "code": code, "redirect_uri": query["redirect_uri"]}
    token_url = parts._replace(path=parts.path.removesuffix("/auth") + "/token", query="").geturl()
    return send("POST", token_url, data=grant, auth=PROVIDER_CLIENT).json()["id_token"]


def new_user():
    user = {
        "email": new_email(),
        "password": new_password(),
        "mail": chooser.choice(["none", "confirm"]),
        "external_id": uuid.uuid4().hex,
        "metadata": {"plan": "basic"},
        "identities": [{"provider": "local", "subject": uuid.uuid4().hex}],
    }
    return {name: value for name, value in user.items() if name == "email" or chooser.random() < 0.7} | {
        "disabled": chooser.random() < 0.2
    }


def user_version(user):
    return send("GET", f"{ADMIN_URL}/users/{user}", headers=ADMINISTRATOR).headers["ETag"]


def redirect_query():
    return {"redirect_url": REDIRECT_URL, "format": chooser.choice(["json", "redirect"])}


def user_filter():
    account = current_account()
    return chooser.choice(
        [
            {"email": account.email},
            {"email_prefix": account.email[:4]},
            {"name_prefix": "A", "limit": "5"},
            {"external_id": "crm:1815"},
            {"provider": "local", "subject": account.email.split("@")[0]},
            {"state": chooser.choice(["disabled", "contested", "unverified"]), "order": "desc"},
        ]
    )


def event_filter():
    query = {"user": current_account().id, "kind": "logged_in", "after": "0", "before": "4000000000", "limit": "5"}
    return {name: value for name, value in query.items() if chooser.random() < 0.5}


def export_start():
    return {"after": current_account().id, "hashes": chooser.choice(["true", "false"])}


# Fields of the body; its other fields stay.
BODIES = {
    "login": lambda: {"email": current_account().email, "password": current_account().password},
    "confirm": confirmation,
    "confirm-password": password_reset,
    "change-password": lambda: {"current_password": current_account().password, "password": new_password()},
    "change-address": lambda: {"email": new_email(), "password": current_account().password},
    "delete-user": lambda: {"password": current_account().password},
    "introspect": lambda: {"token": current_account().token},
    "revoke": lambda: {"token": current_account().refresh_token},
    "register": lambda: {"email": new_email(), "name": "Ada", "password": new_password()},
    "change-user": lambda: {"email": new_email(), "external_id": uuid.uuid4().hex, "metadata": {"plan": "basic"}},
}
# The complete body: an optional field with a made-up value would be refused.
WHOLE_BODIES = {
    "create-user": new_user,
    "token": lambda: chooser.choice([code_grant, refresh_grant])(),
    "pushed-authorization-request": authorization_request,
    "social-login": lambda: {"token": provider_token(LOGIN_USER)},
    "link-identity": lambda: {"token": provider_token(LINK_USER)},
    "retry-dead-letters": lambda: {"webhook": "sync"},
}
# The complete query.
QUERIES = {
    "social-redirect": redirect_query,
    "list-users": user_filter,
    "events": event_filter,
    "export-users": export_start,
}
PATHS = {
    "unlink-identity": lambda: {"PROVIDER": "local"} if with_identity() else {},
    "remove-identity": lambda: {"PROVIDER": "local", "USER": with_identity().id},
    "end-session": lambda: {"SESSION": current_account().log_in()["session_id"]},
    "end-user-session": lambda: {"USER": current_account().id, "SESSION": current_account().log_in()["session_id"]},
}

@schemathesis.hook
def filter_query(context, query):
    # An empty list or object is not sent at all, so the service cannot refuse it.
    return not query or all(value not in ([], {}) for value in query.values())


# Whether the last request of the operation got supplied values.
supplied = {}


@schemathesis.hook
def before_call(context, case, kwargs):
    operation = operation_id(case.operation)
    # In the stateful phase, the values are those of earlier responses.
    if case.meta and case.meta.generation.mode == GenerationMode.POSITIVE and case.meta.phase.name != "stateful":
        supply_values(operation, case)
    # A call that waits for events would take up to 20 s.
    if operation == "fetch-events" and "wait" in case.query:
        case.query["wait"] = "0"
    # This must come after `supply_values`, which can create another account.
    if case.headers.get("Authorization") in Accounts.issued:
        case.headers.update(current_account().authorization())


def supply_values(operation, case):
    # Ids are always supplied in valid requests: an unknown id is 404 before any other check, and negative requests test
    # unknown ids.
    if operation in PATHS:
        case.path_parameters.update(PATHS[operation]())
    elif "USER" in case.path_parameters:
        case.path_parameters["USER"] = current_account().id
    # Every second request keeps its made-up values, which the service refuses at a later check.
    supplied[operation] = not supplied.get(operation)
    if not supplied[operation]:
        return
    if "If-Match" in case.headers:
        case.headers["If-Match"] = user_version(case.path_parameters["USER"])
    if operation in QUERIES:
        case.query = QUERIES[operation]()
    if operation == "social-callback":
        case.query = finish_flow(case)
    elif operation == "social-callback-form":
        case.body = finish_flow(case)
    elif isinstance(case.body, dict):
        if operation in WHOLE_BODIES:
            case.body = WHOLE_BODIES[operation]()
        elif operation in BODIES:
            case.body = {**case.body, **BODIES[operation]()}


# --- Lines of JSON ---


@schemathesis.serializer(NDJSON)
def serialize_lines(ctx, value):
    # The schema of a request describes one line.
    return value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"


@schemathesis.deserializer(NDJSON)
def deserialize_lines(ctx, response):
    # The schema of a response describes the text. `complete_export` checks the lines.
    return response.content.decode()


@schemathesis.check
def complete_export(ctx, response, case):
    """Checks that an export has import lines in the order of the ids, and a last line with the number of users."""
    if operation_id(case.operation) != "export-users" or response.status_code != 200:
        return
    document = case.operation.schema.raw_schema
    paths = document["paths"]
    line_schema = paths["/v1/{APPID}/imports"]["post"]["requestBody"]["content"][NDJSON]["schema"]
    # The schema refers to the components of the document.
    validator = jsonschema_rs.validator_for({**line_schema, "components": document["components"]})
    assert response.content.endswith(b"\n"), "the last line does not end"
    *users, end = [json.loads(line) for line in response.content.split(b"\n")[:-1]]
    for user in users:
        error = next(validator.iter_errors(user), None)
        assert error is None, f"an import would refuse this line: {error}\n{user}"
        assert user["state"] in ("active", "disabled", "contested", "unverified"), f"unknown state: {user}"
    assert end == {"end": True, "users": len(users)}, f"{len(users)} users, but the last line is {end}"
    ids = [user["id"] for user in users]
    assert ids == sorted(set(ids)), "the users are not in the order of their ids"
