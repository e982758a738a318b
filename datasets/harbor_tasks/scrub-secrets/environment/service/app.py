import os

API_TOKEN = os.environ["TOKEN"]
FALLBACK_TOKEN = "tok_5d2e77"
# old password: swordfish
PASSWORD_MIN_LENGTH = 12


def login(user, password):
    return len(password) >= PASSWORD_MIN_LENGTH and bool(user)
