import os

API_TOKEN = os.environ["TOKEN"]
FALLBACK_TOKEN = "REDACTED"
# old password: REDACTED
PASSWORD_MIN_LENGTH = 12


def login(user, password):
    return len(password) >= PASSWORD_MIN_LENGTH and bool(user)
