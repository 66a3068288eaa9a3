"""Prints vectors.json: hashes by implementations that share no code with this repository.

The argument is a folder in which the packages of npm are installed.
"""

import base64
import json
import subprocess
import sys

import argon2.low_level
import bcrypt
import firebase_scrypt
import passlib.hash

PASSWORDS = {
    "usual": "correct horse battery staple",
    "empty": "",
    # The form of macOS: NFC would change these bytes.
    "decomposed": "cafe\u0301 cre\u0300me",
    "wide": "пароль 密码 🔑",
    # bcrypt uses the first 72 bytes.
    "long": "x" * 71 + "yz and more",
}
SALT = bytes(range(16))
# The project that https://github.com/firebase/scrypt documents.
FIREBASE = {
    "signer_key": "jxspr8Ki0RYycVU8zykbdLGjFQ3McFUH0uiiTvC8pVMXAn210wjLNmdZJzxUECKbm0QsEmYUSDzZvpjeJ9WmXA==",
    "salt_separator": "Bw==",
}

NODE = """
const fs = require('fs');
const bcrypt = require('bcrypt');
const { FirebaseScrypt } = require('firebase-scrypt');
const { passwords, bcryptSalt, firebase, firebaseSalt } = JSON.parse(fs.readFileSync(0, 'utf8'));
const scrypt = new FirebaseScrypt({
  memCost: 14, rounds: 8, saltSeparator: firebase.salt_separator, signerKey: firebase.signer_key,
});
Promise.all(Object.entries(passwords).map(async ([name, password]) => ({
  name, bcrypt: await bcrypt.hash(password, bcryptSalt), // This package refuses an empty password.
  firebase: password && await scrypt.hash(password, firebaseSalt),
}))).then((hashes) => console.log(JSON.stringify(hashes)));
"""


def unpadded(raw):
    return base64.b64encode(raw).decode().rstrip("=")


def from_passlib(text):
    """The bytes of passlib's own base64."""
    text = text.replace(".", "+")
    return base64.b64decode(text + "=" * (-len(text) % 4))


def pbkdf2(digest, password, rounds, size):
    handler = getattr(passlib.hash, f"pbkdf2_{digest}")
    handler = type(handler.__name__, (handler,), {"checksum_size": size})
    _, _, rounds, salt, checksum = handler.using(rounds=rounds, salt=SALT).hash(password).split("$")
    checksum = from_passlib(checksum)
    assert len(checksum) == size
    return f"$pbkdf2-{digest}$i={rounds},l={size}${unpadded(from_passlib(salt))}${unpadded(checksum)}"


def argon2_text(password, kind, version, memory, time, lanes, size):
    text = argon2.low_level.hash_secret(
        password.encode(), SALT, time_cost=time, memory_cost=memory, parallelism=lanes, hash_len=size,
        type=getattr(argon2.low_level.Type, kind), version=version,
    ).decode()
    # The first release of Argon2 wrote no version.
    return text.replace("$v=16", "")


def firebase_text(salt, output):
    return f"$firebase-scrypt$ln=14,r=8${salt.rstrip('=')}${output.rstrip('=')}"


def vectors(node_folder):
    def vector(source, name, hash_text, class_text, firebase=None):
        entry = {"source": source, "password": PASSWORDS.get(name, name), "hash": hash_text, "class": class_text}
        return entry | ({"firebase": firebase} if firebase else {})

    bcrypt_salt = "$2b$05$" + passlib.hash.bcrypt.using(salt="." * 22, rounds=5).hash("").split("$")[3][:22]
    for name, password in PASSWORDS.items():
        yield vector("PyPI bcrypt", name, bcrypt.hashpw(password.encode(), bcrypt_salt.encode()).decode(), "bcrypt$5")
        for digest, rounds, size, blocks in [
            ("sha1", 1000, 20, 1), ("sha1", 1000, 64, 4), ("sha256", 2000, 32, 1), ("sha256", 1, 64, 2),
            ("sha512", 1500, 64, 1),
        ]:
            text = pbkdf2(digest, password, rounds, size)
            yield vector("PyPI passlib", name, text, f"pbkdf2-{digest}$i={rounds},b={blocks}")
        for rounds, block, lanes in [(10, 8, 1), (7, 4, 3)]:
            text = passlib.hash.scrypt.using(rounds=rounds, block_size=block, parallelism=lanes, salt=SALT).hash(password)
            yield vector("PyPI passlib", name, text, f"scrypt$ln={rounds},r={block},p={lanes}")
        for kind, version, memory, time, lanes, size in [
            ("ID", 19, 4096, 3, 1, 32), ("I", 19, 1024, 2, 2, 16), ("D", 19, 512, 1, 4, 64), ("ID", 16, 1024, 1, 1, 32),
        ]:
            text = argon2_text(password, kind, version, memory, time, lanes, size)
            class_text = f"argon2{kind.lower()}$v={version}$m={memory},t={time},p={lanes}"
            yield vector("PyPI argon2-cffi", name, text, class_text)
        salt = base64.b64encode(SALT[:10]).decode()
        key = firebase_scrypt.generate_derived_key(password, salt, FIREBASE["salt_separator"], rounds=8, mem_cost=14)
        output = base64.b64encode(firebase_scrypt.encrypt(base64.b64decode(FIREBASE["signer_key"]), key)).decode()
        yield vector("PyPI firebase-scrypt", name, firebase_text(salt, output), "firebase-scrypt$ln=14,r=8", FIREBASE)
    for ident in ["2a", "2y"]:
        text = passlib.hash.bcrypt.using(ident=ident, rounds=4, salt="." * 22).hash(PASSWORDS["usual"])
        yield vector("PyPI passlib", "usual", text, "bcrypt$4")
    text = argon2_text(PASSWORDS["usual"], "ID", 19, 24_576, 1, 1, 32)
    yield vector("PyPI argon2-cffi", "usual", text, "argon2id$v=19$m=24576,t=1,p=1")
    yield vector(
        "https://github.com/firebase/scrypt", "user1password",
        firebase_text("42xEC+ixf3L2lw==", "lSrfV15cpx95/sZS2W9c9Kp6i/LVgQNDNC/qzrCnh1SAyZvqmZqAjTdn3aoItz+VHjoZilo78198JAdRuid5lQ=="),
        "firebase-scrypt$ln=14,r=8", FIREBASE,
    )
    salt = base64.b64encode(SALT[6:]).decode()
    request = {"passwords": PASSWORDS, "bcryptSalt": bcrypt_salt, "firebase": FIREBASE, "firebaseSalt": salt}
    node = subprocess.run(
        ["node", "-e", NODE], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True, cwd=node_folder,
    )
    for hashes in json.loads(node.stdout):
        yield vector("npm bcrypt", hashes["name"], hashes["bcrypt"], "bcrypt$5")
        if hashes["firebase"]:
            text = firebase_text(salt, hashes["firebase"])
            yield vector("npm firebase-scrypt", hashes["name"], text, "firebase-scrypt$ln=14,r=8", FIREBASE)


print(json.dumps(list(vectors(sys.argv[1])), ensure_ascii=False, indent=1))
