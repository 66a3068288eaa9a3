"""Receives events of Latchkey and prints each one as a line of JSON.

WEBHOOK_KEY: the key `current` of the webhook's Secret. PORT: where to listen; 8000 by default.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standardwebhooks import Webhook, WebhookVerificationError

MAX_BODY = 1024 * 1024
webhook = Webhook(os.environ["WEBHOOK_KEY"])


class Receiver(BaseHTTPRequestHandler):
    timeout = 10

    def do_POST(self):
        try:
            size = int(self.headers.get("Content-Length", -1))
            if not 0 <= size <= MAX_BODY:
                raise ValueError("the body is too large, or its length is missing")
            # The signature covers the bytes of the body, so verify these bytes, not JSON that was parsed and written
            # again.
            event = webhook.verify(self.rfile.read(size), dict(self.headers))
        # A malformed header is a ValueError.
        except (WebhookVerificationError, ValueError) as error:
            print(f"refused: {error}", file=sys.stderr, flush=True)
            self.respond(400)
            return
        # Store the event here, before the response: after a 2xx, Latchkey does not send it again.
        sys.stdout.write(json.dumps({"id": self.headers["webhook-id"], **event}) + "\n")
        sys.stdout.flush()
        self.respond(204)

    def respond(self, status):
        self.send_response(status)
        self.end_headers()

    def log_message(self, format, *args):
        pass


ThreadingHTTPServer(("", int(os.environ.get("PORT", 8000))), Receiver).serve_forever()
