"""The API over real sockets: agreement with Predictor and the command, bounds, queues, state, and who may ask."""

import base64
import io
import json
import socket
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from serve.serving import running, until
from small_weights import TASKS, pixels, weights

from pale import zoo
from pale.cli import main
from pale.predict import Predictor
from pale.serve import Limits, Models
from pale.view_attention import Glance, look, usual_size

each_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    return weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def server(made):
    models = Models(list(made.values()), device="cpu", score=0.0)
    models.warm_up()
    limits = Limits(wait_ms=0, max_upload_mb=0.5, max_pixels=400_000)
    with running(models, limits, ["127.0.0.1", "localhost"]) as found:
        yield found


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def kinds() -> dict[str, bytes]:
    """Files that readers often get wrong."""
    image = Image.fromarray(pixels(91, 60))
    exif = Image.Exif()
    exif[274] = 6
    clear = np.dstack([pixels(37, 53), np.tile(np.arange(37, dtype=np.uint8) * 6, (53, 1))])
    return {
        "odd": file_of(Image.fromarray(pixels(113, 47))),
        "turned": file_of(image, "JPEG", exif=exif, quality=92),
        "grey": file_of(image.convert("L")),
        "clear": file_of(Image.fromarray(clear)),
        "cmyk": file_of(image.convert("CMYK"), "JPEG"),
        "webp": file_of(image, "WEBP"),
    }


def near(one, two) -> bool:
    """Alike, but for float rounding."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(near(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(near(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, float):
        return one == pytest.approx(two, abs=1e-3)
    return one == two


class TestAgreement:
    @each_task
    def test_server_predictor_and_command_say_the_same(
        self, server, made, task, tmp_path, capsys, monkeypatch
    ):
        predictor = Predictor(made[task], device="cpu", score=0.0)
        files = kinds()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        monkeypatch.chdir(tmp_path)
        words = ["predict", *files, "--weights", made[task], "--json", "--score", "0"]
        assert main([str(w) for w in [*words, "--device", "cpu", "--batch", "1"]]) == 0
        lines = {
            line["picture"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())
        }
        for name, content in files.items():
            raw = server.client.post(f"/predict/{task}", content=content).json()
            form = server.client.post(f"/predict/{task}", files={"file": (name, content)}).json()
            timing = raw.pop("timing"), form.pop("timing")
            assert {"read_ms", "decode_ms", "queue_ms", "model_ms", "total_ms"} < timing[0].keys()
            assert raw.pop("task") == form.pop("task") == task
            assert raw.pop("picture") == "picture"
            assert form["picture"] == name
            alone = json.loads(json.dumps(predictor(content, name).plain()))
            assert near(form, alone), name
            assert near(form, lines[name]), name
            assert near(raw, {k: v for k, v in form.items() if k != "picture"}), name

    @each_task
    def test_the_drawn_picture_is_the_predictors(self, server, made, task):
        content = kinds()["turned"]
        answer = server.client.post(f"/predict/{task}?output=drawn", content=content)
        assert answer.headers["content-type"] == "image/jpeg"
        drawn = Image.open(io.BytesIO(answer.content))
        alone = Predictor(made[task], device="cpu", score=0.0)(content).draw()
        assert drawn.size == alone.size
        same = Image.open(io.BytesIO(file_of(alone, "JPEG", quality=90)))
        difference = np.asarray(drawn).astype(int) - np.asarray(same)
        assert np.abs(difference).mean() < 1

    def test_the_mask_holds_class_numbers_at_the_pictures_size(self, server, made):
        content = kinds()["turned"]
        alone = Predictor(made["segmentation"], device="cpu")(content)
        answer = server.client.post("/predict/segmentation?output=mask", content=content)
        assert answer.headers["content-type"] == "image/png"
        inline = server.client.post("/predict/segmentation?inline_mask=true", content=content)
        for png in (answer.content, base64.b64decode(inline.json()["mask"])):
            mask = Image.open(io.BytesIO(png))
            assert mask.mode == "P"
            assert (np.asarray(mask) == alone.labels).mean() > 0.999
            assert mask.getpalette()[:6] == [v for c in alone.colours[:2] for v in c]

    @pytest.mark.parametrize("workers", [8])
    def test_pictures_of_many_askers_at_once_are_not_mixed_up(self, server, made, workers):
        predictor = Predictor(made["classification"], device="cpu")
        files = [file_of(Image.fromarray(np.roll(pixels(), 7 * i, 1))) for i in range(24)]
        with ThreadPoolExecutor(workers) as pool:
            answers = pool.map(
                lambda c: server.client.post("/predict/classification", content=c).json(), files
            )
        for content, answer in zip(files, answers, strict=True):
            assert near(answer["classes"], predictor(content).plain()["classes"])


class TestLook:
    @each_task
    def test_a_points_attention_is_that_of_the_operator(self, server, made, task):
        content = kinds()["odd"]
        answer = server.client.post(f"/look?task={task}&x=70&y=20", content=content).json()
        loaded = Predictor(made[task], device="cpu").loaded
        seen = Glance(loaded, Image.open(io.BytesIO(content)).convert("RGB"), usual_size(loaded))
        if task == "classification":
            both = look(Image.open(io.BytesIO(content)), made[task])
            assert both.weights(2, (0, 0)) == pytest.approx(seen.weights(2, (0, 0)), abs=1e-6)
        for s, stage in enumerate(answer["stages"]):
            at = seen.token((70, 20), s)
            assert stage["token"] == list(at)
            weights_ = np.array(stage["attention"])
            assert weights_.sum() == pytest.approx(1, abs=1e-5)
            assert weights_ == pytest.approx(seen.weights(s, at).mean(0), abs=1e-6)
            pale_ = np.array(stage["pale"])
            assert np.array_equal(pale_ > 0, seen.region(s, at).any(0))
            assert (weights_[pale_ == 0] == 0).all()

    def test_the_page_gets_queries_and_keys_and_a_photo_where_it_asks(self, server):
        content = kinds()["turned"]
        answer = server.client.post("/look", content=content).json()
        assert (answer["task"], answer["width"], answer["height"]) == ("classification", 60, 91)
        assert "photo" not in answer
        for stage in answer["stages"]:
            (block,) = stage["blocks"]
            count = stage["h"] * stage["w"] * block["heads"] * block["d"]
            for name in "qk":
                numbers = np.frombuffer(base64.b64decode(block[name]), "<f2")
                assert numbers.size == count
                assert np.isfinite(numbers).all()
        shown = server.client.post("/look?photo=true", content=content).json()["photo"]
        prefix, _, data = shown.partition(",")
        assert prefix == "data:image/jpeg;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == (60, 91)

    @pytest.mark.parametrize(
        ("query", "words"),
        [("x=3", "give both"), ("x=91&y=0", "outside"), ("x=-1&y=0", "outside"), ("x=nan&y=1", "")],
    )
    def test_a_point_that_is_none_is_told(self, server, query, words):
        answer = server.client.post(f"/look?{query}", content=kinds()["grey"])
        assert answer.status_code == 422
        assert words in answer.json()["error"]


class TestRefusals:
    def refused(self, server, status, content=None, path="/predict/classification", **more) -> str:
        answer = server.client.post(path, content=content, **more)
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
        return answer.json()["error"]

    def test_what_is_no_picture(self, server):
        assert "no picture that can be read" in self.refused(server, 415, b"just words")
        assert "no picture that can be read" in self.refused(server, 415, b"%!PS-Adobe-3.0 EPSF\n")
        assert "no picture that can be read" in self.refused(server, 415, b"/etc/passwd")
        assert "there is no picture" in self.refused(server, 422, b"")
        good = file_of(Image.fromarray(pixels()))
        assert "damaged" in self.refused(server, 422, good[: len(good) // 2])
        floats = file_of(Image.fromarray(np.zeros((5, 5), np.float32)), "TIFF")
        assert "damaged" in self.refused(server, 422, floats)

    def test_too_many_bytes(self, server):
        too_many = bytes(600_000)
        assert "0.5 MB" in self.refused(server, 413, too_many)
        chunks = (too_many[i : i + 50_000] for i in range(0, len(too_many), 50_000))
        assert "0.5 MB" in self.refused(server, 413, chunks)  # no length is told beforehand
        form = {"file": ("a.png", too_many)}
        assert "0.5 MB" in self.refused(server, 413, files=form)

    def test_too_many_pixels_are_never_decoded(self, server):
        bomb = file_of(Image.new("1", (9_000, 9_000)))
        assert len(bomb) < 20_000
        assert "9000x9000" in self.refused(server, 413, bomb)
        head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
        bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d))
            for t, d in ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(9))))
        )
        assert "400,000 pixels" in self.refused(server, 413, bomb)
        wide = file_of(Image.new("1", (800, 600)))
        assert "800x600" in self.refused(server, 413, wide)

    def test_a_narrow_picture_that_would_be_huge_for_the_model(self, server):
        narrow = file_of(Image.new("L", (100_000, 1)))
        assert "too narrow" in self.refused(server, 413, narrow)
        answer = server.client.post("/look", content=narrow)
        assert answer.status_code == 200

    def test_forms_that_are_none(self, server):
        head = {"content-type": "multipart/form-data; boundary=b"}
        cases = [
            b"--b\r\n",
            b"nothing of the kind",
            b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\nwords\r\n--b--\r\n',
            b'--b\r\nContent-Disposition: form-data; name="f"; filename="a"\r\n\r\n\r\n--b--\r\n',
        ]
        for content in cases:
            assert self.refused(server, 422, content, headers=head)
        assert self.refused(server, 422, b"", headers={"content-type": "multipart/form-data"})
        two = [("a", ("a.png", b"1")), ("b", ("b.png", b"2"))]
        assert "Too many files" in self.refused(server, 422, files=two)

    def test_questions_that_are_none(self, server):
        good = file_of(Image.fromarray(pixels()))
        words = self.refused(server, 404, good, "/predict/regression")
        assert "there is one for classification, segmentation, detection" in words
        assert "output" in self.refused(server, 422, good, "/predict/detection?output=gif")
        words = self.refused(server, 422, good, "/predict/detection?output=mask")
        assert "a mask is what segmentation gives" in words
        assert server.client.get("/predict/detection").status_code == 405
        assert "see /docs" in server.client.get("/nowhere").json()["error"]

    @pytest.mark.parametrize(
        "path",
        [
            "/../../../../etc/passwd",
            "/..%2f..%2f..%2fetc%2fpasswd",
            "/serve.js/../../../../etc/passwd",
            "//etc/passwd",
            "/example?file=/etc/passwd",
            "/predict/..%2f..%2fetc%2fpasswd",
        ],
    )
    def test_no_path_of_a_request_is_opened(self, server, path):
        host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
        with socket.create_connection((host, port), 30) as raw:
            raw.sendall(f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert b"root:" not in answer
        assert answer.split()[1] in (b"404", b"405") or path.startswith("/example")

    def test_names_of_files_are_told_without_their_folders(self, server):
        good = file_of(Image.fromarray(pixels()))
        for name, told in {
            "../../etc/passwd": "passwd",
            "C:\\Users\\me\\cat.png": "cat.png",
            "/": "picture",
            "a\u202eb.png": "ab.png",
            "x" * 999: "x" * 200,
        }.items():
            form = {"file": (name, good)}
            answer = server.client.post("/predict/classification", files=form).json()
            assert answer["picture"] == told

    def test_nothing_is_written(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))  # a file would fail
        good = file_of(Image.fromarray(pixels(400, 400)), "BMP")
        form = {"file": ("large.bmp", good)}
        assert len(good) > 400_000
        assert server.client.post("/predict/classification", files=form).status_code == 200


class TestState:
    def test_health_tells_models_device_and_bounds_and_no_place(self, server, made):
        about = server.client.get("/health").json()
        assert about["status"] == "ready"
        assert about["device"] == "cpu"
        assert list(about["models"]) == TASKS
        assert about["models"]["detection"] == {
            "model": "Mask R-CNN on pale_nano",
            "trained": True,
            "classes": 8,
            "look": True,
        }
        assert about["limits"]["max_pixels"] == 400_000
        assert str(made["detection"].parent) not in json.dumps(about)

    def test_metrics_count_requests_by_task_and_status(self, server):
        def numbers() -> dict[str, float]:
            text = server.client.get("/metrics").text
            rows = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"]
            return {name: float(value) for name, value in rows}

        before = numbers()
        good = file_of(Image.fromarray(pixels()))
        for _ in range(3):
            server.client.post("/predict/detection", content=good)
        server.client.post("/predict/detection", content=b"bad")
        for i in range(5):
            server.client.post(f"/predict/unknown{i}", content=good)
        after = numbers()

        def more(name: str) -> float:
            return after[name] - before.get(name, 0)

        label = 'kind="predict",task="detection"'
        assert more('pale_requests_total{kind="predict",status="200",task="detection"}') == 3
        assert more('pale_requests_total{kind="predict",status="415",task="detection"}') == 1
        assert more('pale_requests_total{kind="predict",status="404",task="none"}') == 5
        assert more(f"pale_request_seconds_count{{{label}}}") == 3
        assert more(f"pale_batch_pictures_sum{{{label}}}") == 3
        assert after[f"pale_queue_pictures{{{label}}}"] == 0
        assert after["process_resident_memory_bytes"] > 1e6
        assert "unknown" not in str(after)

    def test_the_schema_is_whole_and_tells_every_question(self, server):
        schema = server.client.get("/openapi.json").json()
        assert schema["openapi"].startswith("3.1")
        assert set(schema["paths"]) == {
            "/predict/{task}",
            "/look",
            "/health",
            "/metrics",
            "/example",
        }

        def refs(part):
            if isinstance(part, dict):
                yield from [part["$ref"]] if "$ref" in part else []
                for value in part.values():
                    yield from refs(value)
            elif isinstance(part, list):
                for value in part:
                    yield from refs(value)

        found = set(refs(schema))
        assert found == {"#/components/schemas/Error"}
        for ref in found:
            part = schema
            for key in ref.removeprefix("#/").split("/"):
                part = part[key]
        for methods in schema["paths"].values():
            for about in methods.values():
                assert about["responses"]
                assert about["description"]
                for parameter in about.get("parameters", []):
                    assert {"name", "in", "schema"} <= parameter.keys()

    def test_pages_need_nothing_from_elsewhere(self, server):
        for path in ("/", "/docs", "/serve.js", "/serve.css", "/attention.js"):
            answer = server.client.get(path)
            assert answer.status_code == 200, path
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            text = text.replace("http://127.0.0.1:8000", "")
            assert "http:" not in text, path
            assert "https:" not in text, path
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in answer.headers
        assert "/predict/{task}" in server.client.get("/docs").text
        example = server.client.get("/example")
        assert Image.open(io.BytesIO(example.content)).size == (451, 300)

    def test_other_names_and_other_sites_are_refused(self, server):
        answer = server.client.get("/health", headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]
        assert server.client.get("/health", headers={"host": "LOCALHOST:1"}).status_code == 200
        cross = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
        good = file_of(Image.fromarray(pixels()))
        answer = server.client.post("/predict/detection", content=good, headers=cross)
        assert answer.status_code == 403
        assert answer.headers["x-content-type-options"] == "nosniff"


class Gated(Models):
    """Models that work when they are let; `batches` tells what they were given."""

    def __init__(self, *sources, **options) -> None:
        super().__init__(*sources, **options)
        self.gate, self.batches = threading.Event(), []

    def predict(self, task, items):
        self.batches.append([item.name for item in items])
        assert self.gate.wait(60)
        if any(item.name == "bad" for item in items):
            raise RuntimeError("this one is too much\nand more")
        return super().predict(task, items)


@pytest.fixture
def gated(made):
    return Gated([made["classification"]], device="cpu")


def post(server, name: str = "picture", **more) -> httpx.Response:
    form = {"file": (name, file_of(Image.fromarray(pixels())))}
    return httpx.post(
        f"{server.url}/predict/classification", files=form, timeout=60, trust_env=False, **more
    )


class TestQueue:
    def test_what_waits_goes_together_and_what_is_too_much_is_refused(self, gated):
        limits = Limits(batch=4, wait_ms=0, queue=6)
        with running(gated, limits) as server, ThreadPoolExecutor(16) as pool:
            queue = server.service.predicting["classification"]
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            rest = [pool.submit(post, server, f"p{i}") for i in range(6)]
            until(lambda: queue.depth == 6 and not queue.reserved)
            refused = [post(server) for _ in range(3)]
            assert server.client.get("/health").status_code == 200
            gated.gate.set()
            answers = [first.result(), *(r.result() for r in rest)]
        for answer in refused:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"] == "6 pictures wait already; try again in a moment"
        assert [a.status_code for a in answers] == [200] * 7
        assert [len(batch) for batch in gated.batches] == [1, 4, 2]
        assert sorted(n for b in gated.batches[1:] for n in b) == [f"p{i}" for i in range(6)]
        assert {a.json()["picture"] for a in answers} == {"first", *(f"p{i}" for i in range(6))}
        assert all(near(a.json()["classes"], answers[0].json()["classes"]) for a in answers)

    def test_what_is_late_is_told_and_work_that_has_not_begun_is_dropped(self, gated):
        with running(gated, Limits(batch=1, timeout=0.7)) as server:
            with ThreadPoolExecutor(3) as pool:
                answers = [f.result() for f in [pool.submit(post, server, f"{i}") for i in "123"]]
            assert [a.status_code for a in answers] == [504] * 3
            assert "within 0.7 s" in answers[0].json()["error"]
            # An answer may be read before its request has ended in the server's thread.
            until(lambda: server.service.predicting["classification"].depth == 0)
            until(lambda: server.service.budget.used == 0)
            gated.gate.set()
            assert post(server, "after").status_code == 200
        assert len(gated.batches) <= 2  # on a busy machine not even the first may have begun
        assert gated.batches[-1] == ["after"]

    def test_a_client_that_goes_away_leaves_nothing_behind(self, gated):
        with running(gated, Limits(batch=1)) as server, ThreadPoolExecutor(1) as pool:
            queue = server.service.predicting["classification"]
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            content = file_of(Image.fromarray(pixels()))
            address = httpx.URL(server.url).host, httpx.URL(server.url).port
            with socket.create_connection(address, 30) as raw:
                head = f"POST /predict/classification HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
                raw.sendall(head.encode() + content)
                until(lambda: queue.depth == 1 and not queue.reserved)
            until(lambda: queue.depth == 0)
            gated.gate.set()
            assert first.result().status_code == 200
            text = server.client.get("/metrics").text
            assert 'status="499",task="classification"} 1.0' in text
        assert gated.batches == [["first"]]

    def test_a_body_that_does_not_come_is_not_waited_for(self, gated):
        with running(gated, Limits(timeout=0.3)) as server:
            address = httpx.URL(server.url).host, httpx.URL(server.url).port
            with socket.create_connection(address, 30) as raw:
                head = (
                    "POST /predict/classification HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
                )
                raw.sendall(head.encode() + b"a few bytes")
                assert raw.recv(65536).startswith(b"HTTP/1.1 408")
            assert server.service.predicting["classification"].depth == 0
            assert server.service.budget.used == 0

    def test_one_bad_picture_does_not_spoil_the_batch(self, gated):
        with running(gated, Limits(batch=4, wait_ms=0)) as server, ThreadPoolExecutor(8) as pool:
            queue = server.service.predicting["classification"]
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            names = ["a", "bad", "c"]
            rest = [pool.submit(post, server, n) for n in names]
            until(lambda: queue.depth == 3 and not queue.reserved)
            gated.gate.set()
            found = {n: r.result() for n, r in zip(names, rest, strict=True)}
            assert first.result().status_code == 200
        assert found["a"].status_code == found["c"].status_code == 200
        assert found["bad"].status_code == 500
        assert found["bad"].json()["error"].endswith("on this picture: this one is too much")

    def test_memory_for_large_pictures_is_bounded(self, gated):
        with running(gated, Limits(batch=1)) as server, ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, server, "first")
            until(lambda: gated.batches == [["first"]])
            server.service.budget.total = server.service.budget.used + 1000
            answer = post(server, "second")
            assert answer.status_code == 429
            assert "too many large pictures" in answer.json()["error"]
            gated.gate.set()
            assert first.result().status_code == 200


class TestCommand:
    def error(self, capsys, *words) -> str:
        assert main(["serve", *map(str, words)]) == 1
        return capsys.readouterr().err

    def test_without_weights_it_says_what_to_give(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(zoo, "FOLDER", tmp_path)
        assert "--weights RUN" in self.error(capsys, "--port", 0)

    def test_one_model_a_task(self, made, capsys):
        twice = ["--weights", made["detection"]] * 2
        assert "both for detection" in self.error(capsys, "--port", 0, *twice)

    def test_a_port_in_use_is_told_before_anything_is_loaded(self, capsys):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            told = self.error(capsys, "--port", port, "--weights", "nowhere")
        assert f"cannot listen on 127.0.0.1 port {port}" in told
        assert "--port" in told

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--batch", 0, "batch must be at least 1, got 0"),
            ("--queue", 0, "queue must be at least 1, got 0"),
            ("--wait-ms", -1, "wait_ms must be at least 0, got -1"),
            ("--timeout", 0, "timeout must be above 0, got 0"),
            ("--max-upload-mb", "nan", "max_upload_mb must be above 0, got nan"),
            ("--max-pixels", 0, "max_pixels must be at least 1, got 0"),
            ("--threads", 0, "--threads must be at least 1, got 0"),
        ],
    )
    def test_bounds_that_are_none(self, capsys, option, value, words):
        assert words in self.error(capsys, option, value)
