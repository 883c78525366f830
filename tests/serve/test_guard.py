"""Access by token, over real sockets."""

import hmac

import pytest
from PIL import Image
from serve.images import file_of
from serve.serving import running
from support.weights import pixels

from pale.serve import Models

SECRET = "a-token-of-enough-characters"


@pytest.fixture(scope="module")
def closed(made):
    """A server that needs a token."""
    with running(Models([made["classification"]], device="cpu"), token=SECRET) as found:
        yield found


def bearer(token: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"authorization": f"{scheme} {token}"}


class TestToken:
    def test_with_the_token_requests_are_answered(self, closed):
        good = file_of(Image.fromarray(pixels()))
        for scheme in ("Bearer", "bearer"):
            headers = bearer(SECRET, scheme)
            answer = closed.client.post("/predict/classification", content=good, headers=headers)
            assert answer.status_code == 200
        for path in ("/metrics", "/health"):
            assert closed.client.get(path, headers=bearer(SECRET)).status_code == 200
        assert "models" in closed.client.get("/health", headers=bearer(SECRET)).json()

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": "Bearer"},
            bearer(SECRET[:-1]),
            bearer(SECRET + "x"),
            bearer(SECRET.upper()),
            bearer(SECRET, "Basic"),
            {"authorization": SECRET},
            {"authorization": b"Bearer \xff\xfe"},
        ],
        ids=["none", "empty", "short", "long", "upper case", "basic", "no scheme", "not ASCII"],
    )
    def test_without_the_token_requests_are_refused(self, closed, headers):
        good = file_of(Image.fromarray(pixels()))
        for path in ("/predict/classification", "/look", "/predict/none", "/nowhere"):
            answer = closed.client.post(path, content=good, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "Authorization: Bearer TOKEN" in answer.json()["error"]
        assert closed.client.get("/metrics", headers=headers).status_code == 401
        assert SECRET not in answer.text

    def test_a_large_body_without_the_token_gets_the_error_too(self, closed):
        answer = closed.client.post("/predict/classification", content=bytes(3_000_000))
        assert answer.status_code == 401

    def test_page_and_health_need_no_token_and_reveal_nothing(self, closed):
        assert closed.client.get("/health").json() == {"status": "ready", "token": "required"}
        for path in ("/", "/serve.js", "/serve.css", "/attention.js", "/docs", "/example"):
            assert closed.client.get(path).status_code == 200
        # A wrong token is an error, so that the page can ask again.
        assert closed.client.get("/health", headers=bearer("x" * 20)).status_code == 401

    def test_tokens_are_compared_in_constant_time(self, closed, monkeypatch):
        seen = []
        compare = hmac.compare_digest
        monkeypatch.setattr(
            hmac, "compare_digest", lambda a, b: seen.append((a, b)) or compare(a, b)
        )
        closed.client.get("/metrics", headers=bearer("wrong"))
        assert seen == [(b"wrong", SECRET.encode())]
