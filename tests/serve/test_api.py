"""The API over real sockets: agreement with Predictor and the command, limits, state."""

import base64
import io
import json
import socket
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from PIL import Image
from serve.images import NAME, file_of, kinds, near
from serve.serving import running
from support.weights import TASKS, pixels

from pale.cli.main import main
from pale.predict import Predictor
from pale.serve import Limits, Models
from pale.serve.models import Prepared
from pale.view.attention import BackboneTrace, default_size, trace_attention

each_task = pytest.mark.parametrize("task", TASKS)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def server(made, one_thread):
    models = Models(list(made.values()), device="cpu", score=0.0)
    models.warm_up()
    limits = Limits(wait_ms=0, max_upload_mb=0.5, max_pixels=400_000)
    with running(models, limits, ["127.0.0.1", "localhost"]) as found:
        yield found


class TestAgreement:
    @each_task
    def test_server_predictor_and_command_agree(
        self, server, made, task, tmp_path, capsys, monkeypatch
    ):
        predictor = Predictor(made[task], device="cpu", score=0.0)
        files = kinds()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        monkeypatch.chdir(tmp_path)
        words = ["predict", *files, "--weights", made[task], "--json", "--score", "0"]
        assert main([str(w) for w in [*words, "--device", "cpu", "--batch", "1"]]) == 0
        lines = {line[NAME]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
        for name, content in files.items():
            raw = server.client.post(f"/predict/{task}", content=content).json()
            form = server.client.post(f"/predict/{task}", files={"file": (name, content)}).json()
            timing = raw.pop("timing"), form.pop("timing")
            assert {"read_ms", "decode_ms", "queue_ms", "model_ms", "total_ms"} < timing[0].keys()
            assert raw.pop("task") == form.pop("task") == task
            assert raw.pop(NAME) == "image"
            assert form[NAME] == name
            alone = json.loads(json.dumps(predictor(content, name).plain()))
            assert near(form, alone), name
            assert near(form, lines[name]), name
            assert near(raw, {k: v for k, v in form.items() if k != NAME}), name

    @each_task
    def test_the_drawn_image_is_that_of_the_predictor(self, server, made, task):
        content = kinds()["turned"]
        answer = server.client.post(f"/predict/{task}?output=drawn", content=content)
        assert answer.headers["content-type"] == "image/jpeg"
        drawn = Image.open(io.BytesIO(answer.content))
        alone = Predictor(made[task], device="cpu", score=0.0)(content).draw()
        assert drawn.size == alone.size
        same = Image.open(io.BytesIO(file_of(alone, "JPEG", quality=90)))
        difference = np.asarray(drawn).astype(int) - np.asarray(same)
        assert np.abs(difference).mean() < 1

    def test_the_mask_holds_class_numbers_at_the_size_of_the_image(self, server, made):
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

    def test_a_request_sets_its_own_score_threshold(self, server, made):
        content = kinds()["odd"]
        wanted = {}
        for score in (0.0, 0.5):
            alone = Predictor(made["detection"], device="cpu", score=score)(content)
            wanted[score] = len(alone.objects)
        assert 0 < wanted[0.5] < wanted[0.0]
        models = Models([made["detection"]], device="cpu", score=1.0)
        image = Image.open(io.BytesIO(content)).convert("RGB")
        tensor = models.predictors["detection"].prepare(image)
        given = [Prepared("a", image, tensor, score) for score in (None, 0.0, 0.5, None)]
        found = [len(each.objects) for each in models.predict("detection", given)]
        assert found == [0, wanted[0.0], wanted[0.5], 0]
        for query, count in (("?score=0.5", wanted[0.5]), ("", wanted[0.0])):
            answer = server.client.post(f"/predict/detection{query}", content=content).json()
            assert len(answer["objects"]) == count
        for query in ("classification?score=0.5", "detection?score=2"):
            refused = server.client.post(f"/predict/{query}", content=content)
            assert refused.status_code == 422

    @pytest.mark.parametrize("workers", [8])
    def test_images_of_simultaneous_clients_are_not_mixed_up(self, server, made, workers):
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
    def test_the_attention_of_a_point_is_that_of_the_operator(self, server, made, task):
        content = kinds()["odd"]
        answer = server.client.post(f"/look?task={task}&x=70&y=20", content=content).json()
        bundle = Predictor(made[task], device="cpu").loaded
        image = Image.open(io.BytesIO(content)).convert("RGB")
        trace = BackboneTrace(bundle, image, default_size(bundle))
        if task == "classification":
            both = trace_attention(Image.open(io.BytesIO(content)), made[task])
            assert both.weights(2, (0, 0)) == pytest.approx(trace.weights(2, (0, 0)), abs=1e-6)
        for s, stage in enumerate(answer["stages"]):
            at = trace.token((70, 20), s)
            assert stage["token"] == list(at)
            weights_ = np.array(stage["attention"])
            assert weights_.sum() == pytest.approx(1, abs=1e-5)
            assert weights_ == pytest.approx(trace.weights(s, at).mean(0), abs=1e-6)
            pale_ = np.array(stage["pale"])
            assert np.array_equal(pale_ > 0, trace.attended(s, at).any(0))
            assert (weights_[pale_ == 0] == 0).all()

    def test_without_a_point_queries_and_keys_are_returned_and_a_photo_on_request(self, server):
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
    def test_an_invalid_point_is_an_error(self, server, query, words):
        answer = server.client.post(f"/look?{query}", content=kinds()["grey"])
        assert answer.status_code == 422
        assert words in answer.json()["error"]


class TestRefusals:
    def refused(self, server, status, content=None, path="/predict/classification", **more) -> str:
        answer = server.client.post(path, content=content, **more)
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
        return answer.json()["error"]

    def test_a_file_that_is_not_an_image_is_refused(self, server):
        assert "not an image in a supported format" in self.refused(server, 415, b"just words")
        assert "not an image in a supported format" in self.refused(
            server, 415, b"%!PS-Adobe-3.0 EPSF\n"
        )
        assert "not an image in a supported format" in self.refused(server, 415, b"/etc/passwd")
        assert "the request holds no image" in self.refused(server, 422, b"")
        good = file_of(Image.fromarray(pixels()))
        assert "damaged" in self.refused(server, 422, good[: len(good) // 2])
        floats = file_of(Image.fromarray(np.zeros((5, 5), np.float32)), "TIFF")
        assert "damaged" in self.refused(server, 422, floats)

    def test_too_many_bytes(self, server):
        too_many = bytes(600_000)
        assert "0.5 MB" in self.refused(server, 413, too_many)
        chunks = (too_many[i : i + 50_000] for i in range(0, len(too_many), 50_000))
        assert "0.5 MB" in self.refused(server, 413, chunks)  # without a content length
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

    def test_a_side_beyond_the_bound_of_the_whole_package(self, server):
        strip = file_of(Image.new("L", (100_000, 1)))
        assert "a side of more than 65,535 pixels (100000x1)" in self.refused(server, 413, strip)

    def test_a_narrow_image_that_would_be_huge_for_the_model(self, server):
        narrow = file_of(Image.new("L", (60_000, 1)))
        assert "too narrow" in self.refused(server, 413, narrow)
        answer = server.client.post("/look", content=narrow)
        assert answer.status_code == 200

    def test_invalid_forms_are_refused(self, server):
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

    def test_invalid_routes_and_parameters_are_refused(self, server):
        good = file_of(Image.fromarray(pixels()))
        words = self.refused(server, 404, good, "/predict/regression")
        assert "loaded: classification, segmentation, detection" in words
        assert "output" in self.refused(server, 422, good, "/predict/detection?output=gif")
        words = self.refused(server, 422, good, "/predict/detection?output=mask")
        assert "detection has no mask" in words
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

    def test_names_of_files_are_returned_without_their_folders(self, server):
        good = file_of(Image.fromarray(pixels()))
        for name, plain in {
            "../../etc/passwd": "passwd",
            "C:\\Users\\me\\cat.png": "cat.png",
            "/": "image",
            "a\u202eb.png": "ab.png",
            "x" * 999: "x" * 200,
        }.items():
            form = {"file": (name, good)}
            answer = server.client.post("/predict/classification", files=form).json()
            assert answer[NAME] == plain

    def test_nothing_is_written(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))  # a file would fail
        good = file_of(Image.fromarray(pixels(400, 400)), "BMP")
        form = {"file": ("large.bmp", good)}
        assert len(good) > 400_000
        assert server.client.post("/predict/classification", files=form).status_code == 200


class TestState:
    def test_health_reports_models_device_and_limits_and_no_path(self, server, made):
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
        assert about["limits"]["memory_mb"] == 2000
        assert about["limits"]["model_memory_mb"] > 0
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

        label = 'kind="predict",model="detection",task="detection"'
        assert (
            more(
                'pale_requests_total{kind="predict",model="detection",status="200",task="detection"}'
            )
            == 3
        )
        assert (
            more(
                'pale_requests_total{kind="predict",model="detection",status="415",task="detection"}'
            )
            == 1
        )
        assert (
            more('pale_requests_total{kind="predict",model="none",status="404",task="none"}') == 5
        )
        assert more(f"pale_request_seconds_count{{{label}}}") == 3
        assert more(f"pale_batch_pictures_sum{{{label}}}") == 3
        assert after[f"pale_queue_pictures{{{label}}}"] == 0
        assert after["process_resident_memory_bytes"] > 1e6
        assert "unknown" not in str(after)

    def test_the_schema_is_complete_and_describes_every_route(self, server):
        schema = server.client.get("/openapi.json").json()
        assert schema["openapi"].startswith("3.1")
        assert set(schema["paths"]) == {
            "/predict/{task}",
            "/look",
            "/health",
            "/metrics",
            "/example",
            "/v2",
            "/v2/health/live",
            "/v2/health/ready",
            "/v2/models/{name}",
            "/v2/models/{name}/ready",
            "/v2/models/{name}/infer",
            "/v2/repository/index",
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

    def test_pages_load_nothing_from_other_sites(self, server):
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

    def test_other_hosts_and_other_sites_are_refused(self, server):
        answer = server.client.get("/health", headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]
        assert server.client.get("/health", headers={"host": "LOCALHOST:1"}).status_code == 200
        cross = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
        good = file_of(Image.fromarray(pixels()))
        answer = server.client.post("/predict/detection", content=good, headers=cross)
        assert answer.status_code == 403
        assert answer.headers["x-content-type-options"] == "nosniff"
