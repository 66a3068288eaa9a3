"""Tests verify.py with sample requests that are signed here, without a server."""

import json
import time
import unittest
import uuid

import verify

OLD = "whsec_b2xkIG9sZCBvbGQgb2xkIG9sZCBvbGQh"
NEW = "whsec_bmV3IG5ldyBuZXcgbmV3IG5ldyBuZXcgbmV3IG5ldyBuZXch"
PROFILE = {
    "email": "ada@example.com",
    "email_verified": True,
    "name": "Ada Löwe 🦁",
    "state": "active",
    "external_id": None,
    "version": 4,
}


def record(kind, keys, age=0, **data):
    """A recorded request as the server sends it, as a JSON object."""
    identifier, timestamp = str(uuid.uuid4()), int(time.time()) - age
    members = {"app": "shop", "user_id": str(uuid.uuid4()), "session_id": None, "version": 4, "detail": None, **data}
    event = {"type": kind, "timestamp": "2026-11-23T06:30:00.120Z", "data": members}
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    signatures = [verify.sign(key, identifier, timestamp, body.encode()) for key in keys]
    headers = {
        "Host": "crm.example.com",
        "Content-Type": "application/json",
        "Webhook-Id": identifier,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }
    return {"headers": headers, "body": body, "keys": keys}


def rotation():
    """A rotation from OLD to NEW: one key, both keys, and the other key."""
    return [
        record("user.created", [OLD], user=PROFILE),
        record("session.created", [NEW, OLD], session_id=str(uuid.uuid4()), version=None, detail={"amr": "pwd"}),
        record("user.deleted", [NEW], user=None, age=100),
        record("users.imported", [NEW], user_id=None, version=None, detail={"source": "crm", "created": 2}),
    ]


def run(records):
    return verify.verify(verify.read_recording(map(json.dumps, records)), verify.commands_from_environment())


class Verify(unittest.TestCase):
    def test_requests_are_accepted_through_a_rotation(self):
        checks, failures = run(rotation())
        self.assertEqual(failures, [])
        self.assertGreater(checks, 100)

    def test_every_language_refuses_a_wrong_signature(self):
        records = rotation()
        broken = records[0]["headers"]
        broken["webhook-signature"] = verify.sign(NEW, broken["Webhook-Id"], broken["webhook-timestamp"], b"{}")
        _, failures = run(records)
        for language in ("TypeScript", "Python", "Go"):
            self.assertTrue(any(failure.startswith(f"{language}:") for failure in failures), failures)

    def test_a_missing_signature_of_the_previous_key_is_found(self):
        records = rotation()
        headers = records[1]["headers"]
        headers["webhook-signature"] = headers["webhook-signature"].split(" ")[0]
        _, failures = run(records)
        refused = [failure for failure in failures if "verified with `previous`: refused" in failure]
        self.assertEqual(len(refused), 3, failures)

    def test_a_key_that_should_no_longer_sign_is_found(self):
        records = rotation()
        headers = records[2]["headers"]
        both = [verify.sign(key, headers["Webhook-Id"], headers["webhook-timestamp"], records[2]["body"].encode())
                for key in (NEW, OLD)]
        headers["webhook-signature"] = " ".join(both)
        _, failures = run(records)
        accepted = [failure for failure in failures if "verified with another key: accepted" in failure]
        self.assertEqual(len(accepted), 3, failures)

    def test_a_signature_over_other_bytes_is_found(self):
        records = rotation()
        records[3]["body"] = json.dumps(json.loads(records[3]["body"]))
        _, failures = run(records)
        self.assertGreaterEqual(len(failures), 3)

    def test_an_unusable_recording_is_an_error(self):
        for records in (
            [],
            rotation()[:1],
            [record("user.created", [OLD], age=verify.MAX_AGE + 10), record("user.created", [NEW, OLD])],
            [*rotation(), {"headers": {}, "body": "{}", "keys": [OLD]}],
            [*rotation(), record("user.created", [OLD, NEW, OLD])],
        ):
            with self.assertRaises(verify.Recording):
                verify.read_recording(map(json.dumps, records))


if __name__ == "__main__":
    unittest.main(verbosity=2)
