"""Sends recorded requests of webhooks to receivers that use the official libraries, and checks what they accept.

Each line of the recording is a JSON object:

    {"headers": {"webhook-id": "…", "webhook-timestamp": "…", "webhook-signature": "…"}, "body": "…", "keys": ["whsec_…"]}

`body` is the body as it was sent, as text. `keys` are the keys in the Secret when the request was sent: `current` and, if
it was there, `previous`.
"""

import base64
import binascii
import datetime
import hashlib
import hmac
import http.client
import json
import os
import queue
import random
import shlex
import socket
import subprocess
import sys
import threading
import time

# Limit for the start of a receiver and for a response.
LIMIT = 20
# The libraries accept timestamps of the last five minutes. One minute of these is left for the checks themselves.
MAX_AGE = 4 * 60
# A timestamp that the libraries refuse.
TOO_OLD = 6 * 60
# Headers that belong to one connection.
CONNECTION_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


used_ports = set()


class Recording(Exception):
    """The recording cannot be used."""


class Request:
    """A recorded request."""

    def __init__(self, line):
        try:
            record = json.loads(line)
            self.headers = {name.lower(): value for name, value in record["headers"].items()}
            self.body = record["body"].encode()
            self.keys = record["keys"]
            self.id = self.headers["webhook-id"]
            self.timestamp = int(self.headers["webhook-timestamp"])
            self.signatures = self.headers["webhook-signature"].split(" ")
            self.event = json.loads(self.body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Recording(f"not a recorded request ({error!r}): {line.strip()[:200]}") from None
        if not self.keys or len(self.keys) > 2:
            raise Recording(f"{self.id}: `keys` must have one or two keys")


class Receiver:
    """A running receiver. Each line that it prints is an event that it accepted."""

    def __init__(self, language, command, key):
        self.language = language
        self.port = free_port()
        environment = {**os.environ, "WEBHOOK_KEY": key, "PORT": str(self.port)}
        self.process = subprocess.Popen(
            shlex.split(command), env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)

    def wait_until_ready(self):
        end = time.monotonic() + LIMIT
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the receiver in {self.language} does not start") from None
                time.sleep(0.02)

    def send(self, headers, body):
        """Sends a request. Returns the status and the printed event, which is None if the request was refused."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        sent = {name: value for name, value in headers.items() if name not in CONNECTION_HEADERS}
        connection.request("POST", "/events", body, sent)
        status = connection.getresponse().status
        connection.close()
        if 200 <= status < 300:
            return status, json.loads(self.lines.get(timeout=LIMIT))
        return status, None

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


def free_port():
    """An unused port below the range for outgoing connections, so that no outgoing connection takes it."""
    for port in random.sample(range(20000, 30000), 100):
        if port not in used_ports:
            with socket.socket() as free:
                try:
                    free.bind(("127.0.0.1", port))
                except OSError:
                    continue
            used_ports.add(port)
            return port
    raise RuntimeError("no free port")


def sign(key, message_id, timestamp, body):
    """The signature of Standard Webhooks, written again from its specification."""
    secret = base64.b64decode(key.removeprefix("whsec_"), validate=True)
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def is_same(printed, sent):
    """Whether a receiver printed what was sent. A typed receiver leaves out members that it does not know, and can
    write a time in another form."""
    if isinstance(printed, dict) and isinstance(sent, dict):
        return all(name in sent and is_same(value, sent[name]) for name, value in printed.items())
    if isinstance(printed, str) and isinstance(sent, str) and printed != sent:
        try:
            return datetime.datetime.fromisoformat(printed) == datetime.datetime.fromisoformat(sent)
        except ValueError:
            return False
    return printed == sent


def read_recording(lines):
    requests = [Request(line) for line in lines if line.strip()]
    if not requests:
        raise Recording("the recording is empty")
    if {len(request.keys) for request in requests} != {1, 2}:
        raise Recording("record requests with `current` only, and with `current` and `previous`")
    oldest = min(request.timestamp for request in requests)
    if time.time() - oldest > MAX_AGE:
        raise Recording("the recording is older than four minutes: the libraries would refuse its timestamps")
    return requests


def tampered(body):
    """The body with one changed letter; still JSON."""
    changed = body.replace(b'"type":"', b'"type":"x', 1)
    return changed if changed != body else body + b" "


def check_recorded(request):
    """Compares the signatures with signatures that this script computes. Yields what is wrong."""
    expected = [sign(key, request.id, request.timestamp, request.body) for key in request.keys]
    if request.signatures != expected:
        yield f"{request.id}: the signatures are not those of `current` and `previous`, in this order, with a space between"
    event, data = request.event, request.event.get("data")
    if set(event) != {"type", "timestamp", "data"} or not isinstance(data, dict):
        yield f"{request.id}: the body has the members {sorted(event)}"
    elif not {"app", "user_id", "session_id", "version", "detail"} <= set(data):
        yield f"{request.id}: `data` has the members {sorted(data)}"


def cases(request, all_keys):
    """Requests to send: a name, the key of the receiver, headers, body, and whether the receiver must accept it."""
    headers, body = request.headers, request.body
    for key in request.keys:
        position = "current" if key == request.keys[0] else "previous"
        yield f"verified with `{position}`", key, headers, body, True
        yield f"a changed body, verified with `{position}`", key, headers, tampered(body), False
        yield f"another id, verified with `{position}`", key, {**headers, "webhook-id": request.id + "x"}, body, False
        now = {**headers, "webhook-timestamp": str(request.timestamp - 1)}
        yield f"another timestamp, verified with `{position}`", key, now, body, False
        # The case before this loop proves that this signature would be accepted, if the timestamp were newer.
        for age, accepted in ((0, True), (TOO_OLD, False)):
            timestamp = int(time.time()) - age
            signature = sign(key, request.id, timestamp, body)
            signed = {**headers, "webhook-timestamp": str(timestamp), "webhook-signature": signature}
            yield f"signed again, {age} s ago, verified with `{position}`", key, signed, body, accepted
        missing = {name: value for name, value in headers.items() if name != "webhook-signature"}
        yield f"no signature, verified with `{position}`", key, missing, body, False
        broken = {**headers, "webhook-signature": "v1 v1,? ,"}
        yield f"a malformed signature, verified with `{position}`", key, broken, body, False
    for key in all_keys:
        if key not in request.keys:
            yield "verified with another key", key, headers, body, False


def verify(requests, commands):
    """Returns the number of checks and a list of failures."""
    all_keys = sorted({key for request in requests for key in request.keys})
    failures, checks = [], 0
    for request in requests:
        checks += 1
        try:
            failures += check_recorded(request)
        except binascii.Error:
            raise Recording(f"{request.id}: a key is not in base64") from None
    receivers = {}
    try:
        for language, command in commands.items():
            for key in all_keys:
                receivers[language, key] = Receiver(language, command, key)
        for receiver in receivers.values():
            receiver.wait_until_ready()
        for request in requests:
            for name, key, headers, body, is_good in cases(request, all_keys):
                for language in commands:
                    checks += 1
                    status, printed = receivers[language, key].send(headers, body)
                    what = f"{language}: {request.id} ({request.event.get('type')}), {name}"
                    if is_good != (printed is not None):
                        failures.append(f"{what}: {'refused' if is_good else 'accepted'} with {status}")
                    elif is_good and not is_same(printed, {"id": request.id, **request.event}):
                        failures.append(f"{what}: printed {printed}")
    finally:
        for receiver in receivers.values():
            receiver.stop()
    return checks, failures


def commands_from_environment():
    """The command of each receiver. The script `run` sets the variables."""
    languages = {"TypeScript": "INTEROP_NODE", "Python": "INTEROP_PYTHON", "Go": "INTEROP_GO"}
    return {language: os.environ[variable] for language, variable in languages.items()}


def main(file):
    try:
        with sys.stdin if file == "-" else open(file, encoding="utf-8") as lines:
            requests = read_recording(lines)
        checks, failures = verify(requests, commands_from_environment())
    except Recording as error:
        sys.exit(f"error: {error}")
    for failure in failures:
        print(failure, file=sys.stderr)
    print(f"{len(requests)} recorded requests, {checks} checks, {len(failures)} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main(sys.argv[1])
