"""The page of `nidiff explore` in a real browser and under raw requests: `space/app.py`, served as a user would."""

import io
import json
import os
import re
import shutil
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
from browser import open_page
from PIL import Image
from visitor import Visitor, claimed_png, served

from nidiff.app import gate
from nidiff.app.work import LONGEST
from nidiff.model.zoo import zoo_models

HTML = "<img src=x onerror=alert(1)>"
TABS = {  # and what is drawn there without a click
    "Noise": "#noise-draws img",
    "Forward": "#forward-maps img",
    "Sample": "#sample-view img",
    "Compare": "#compare-view img",
    "Restore": "#restore-view img",
    "Runs": "#runs-losses img",
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two models of the digits, one with a name that is HTML."""
    folder = tmp_path_factory.mktemp("given") / "runs"
    for name in ("digits", HTML):
        run = Path(shutil.copytree(zoo_models()["digits"], folder / name))
        (run / "zoo.json").unlink()
        lines = [{"step": step, "loss": 1 / step, "images_per_s": 10.0} for step in range(1, 20)]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "samples").mkdir()
        for step, other in ((10, "digits-ddpm"), (20, "digits")):
            shutil.copy(zoo_models()[other] / "samples.png", run / "samples" / f"{step:06d}.png")
    return folder


@pytest.fixture(scope="module")
def url(runs, tmp_path_factory):
    """The address of the page."""
    with served(tmp_path_factory.mktemp("place"), runs) as address:
        yield address


@pytest.fixture
def visitor(url):
    with Visitor(url) as visitor:
        yield visitor


def tab(page, name):
    page.get_by_role("tab", name="Forward", exact=True).wait_for()
    if not page.get_by_role("tab", name=name, exact=True).is_visible():  # on a phone there is a menu of the last ones
        page.locator(".overflow-menu > button").click()
        page.locator(".overflow-dropdown").get_by_text(name, exact=True).click()
    else:
        page.get_by_role("tab", name=name, exact=True).click()
    return page.locator(f"[id^={name.lower()}-]:visible").first.wait_for()


def pictures(page, place, before=""):
    """The pictures in an element, once there are any, and others than before."""
    shown = "id => [...document.querySelectorAll(`#${id} img`)].map(image => image.src).join()"
    other = f"([id, before]) => ![before, ''].includes(({shown})(id))"
    page.wait_for_function(other, arg=[place, before])
    return page.evaluate(shown, place)


def slide(page, place, keys):
    """Move a slider by keys, as one can without a mouse."""
    page.locator(f"#{place} input[type=range]").focus()
    for key in keys:
        page.keyboard.press(key)


@pytest.mark.parametrize("dark", [False, True])
def test_every_tab_fits_the_screen_and_follows_light_and_dark(browser, url, dark):
    with open_page(browser, url, 1280, dark) as page:
        for width in (1280, 390):  # of a desk and of a phone
            page.set_viewport_size({"width": width, "height": 900})
            for name, drawn in TABS.items():
                tab(page, name)
                page.locator(drawn).locator("visible=true").first.wait_for()
                over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert over == 0, f"{name} is wider than a screen of {width}"
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        levels = [int(level) for level in re.findall(r"\d+", paper)[:3]]
        assert (max(levels) < 64) == dark
        assert (min(levels) > 192) == (not dark)


def test_pictures_are_there_before_any_answer_and_who_waits_sees_that(browser, url):
    with open_page(browser, url) as page:
        page.route("**/queue/join**", lambda route: None)  # the server answers nothing from now on
        page.reload()
        for name, drawn in TABS.items():
            if name in ("Forward", "Noise"):  # the others show models of the user, which are opened by an event
                tab(page, name)
                page.locator(drawn).locator("visible=true").first.wait_for()
        for name, button in (("Noise", "noise-again"), ("Sample", "sample-draw"), ("Compare", "compare-compare")):
            tab(page, name)
            page.locator(f"#{button}").click()
            page.locator(f"#{name.lower()}-status .progress-text").locator("visible=true").wait_for()


def test_a_message_is_on_its_own_tab_and_goes_with_the_next_answer(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Compare")
        pictures(page, "compare-view")
        page.locator("#compare-second-model input").click()
        page.get_by_role("option", name="turbulence", exact=True).click()
        error = page.locator("#compare-status .error")
        error.get_by_text("choose two models of the same data").wait_for()
        assert page.locator(".error, .toast-body").count() == 1
        page.locator("#compare-second-model input").click()
        page.get_by_role("option", name="digits-ddpm", exact=True).click()
        error.wait_for(state="detached")
        page.locator("#compare-compare").click()
        page.locator("#compare-status").get_by_text("Done").wait_for()
        assert page.locator("#compare-view table").get_by_text("FD-pixels").count() == 1


def test_a_slider_of_the_noise_changes_its_pictures_numbers_and_command(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Noise")
        before = {place: pictures(page, place) for place in ("noise-draws", "noise-correlation")}
        slide(page, "noise-gff-gamma", ["ArrowRight"] * 4)
        for place, shown in before.items():
            pictures(page, place, shown)
        page.locator("#noise-command").get_by_text("gamma=1.2").wait_for()


def test_the_level_changes_what_is_seen_of_the_item(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Forward")
        before = pictures(page, "forward-pictures")
        slide(page, "forward-level", ["ArrowRight"] * 3)
        pictures(page, "forward-pictures", before)


def test_samples_are_drawn_before_ones_eyes_and_can_be_downloaded(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Sample")
        noise = pictures(page, "sample-view")
        page.locator("#sample-draw").click()
        page.wait_for_function("document.getElementById('sample-status').innerText.includes('Done')")
        pictures(page, "sample-view", noise)
        page.locator("button:visible", has_text="Files, and the same on the command line").click()
        link = page.locator("#sample-files a[download$='.npy']").first  # a click is lost if the list is drawn anew
        content = page.request.get(link.get_attribute("href")).body()
        assert np.load(io.BytesIO(content)).shape[1:] == (8, 8, 1)
        assert page.locator("img[src=x]").count() == 0  # the name of the second model stayed text


def test_stop_ends_the_drawing(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Sample")
        pictures(page, "sample-view")
        slide(page, "sample-steps", ["End"])
        page.locator("#sample-draw").click()
        page.locator("#sample-status").get_by_text("of 100").wait_for()
        page.locator("#sample-stop").click()
        page.locator("#sample-status").get_by_text("Stopped.").wait_for()
        with Visitor(url) as other:  # whose turn comes when the first has ended
            event = other.event("sample-draw", "click")
            assert other.ask(event, other.usual(event)).done
        assert "Done" not in page.locator("#sample-status").inner_text()


def test_what_is_black_in_a_picture_is_restored(browser, url, tmp_path):
    Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(tmp_path / "mask.png")
    with open_page(browser, url) as page:
        tab(page, "Restore")
        before = pictures(page, "restore-view")
        page.locator("#restore-way input").click()
        page.get_by_role("option", name="black in my mask").click()
        page.locator("#restore-mask input[type=file]").set_input_files(tmp_path / "mask.png")
        assert pictures(page, "restore-view", before).count("data:image") == 2  # observed, truth
        page.locator("#restore-restore").click()
        page.locator("#restore-status").get_by_text("Done").wait_for()
        assert pictures(page, "restore-view").count("data:image") > 5  # observed, samples, mean, spread, truth


def test_a_hostile_file_gets_a_sentence(browser, url, tmp_path):
    (tmp_path / f"{HTML}.png").write_bytes(claimed_png(20_000, 20_000))
    np.save(tmp_path / "nan.npy", np.full((8, 8), np.nan))
    with open_page(browser, url) as page:
        tab(page, "Restore")
        pictures(page, "restore-view")  # by then no control changes its place any more
        page.locator("#restore-item").get_by_text("my own file").click()
        page.locator("#restore-file").wait_for()
        for file in tmp_path.iterdir():
            page.locator("#restore-file input[type=file]").set_input_files(file)
            error = page.locator("#restore-status .error")
            error.wait_for()
            assert "went wrong" not in error.inner_text(), file
            assert error.inner_text().strip().endswith("."), file
            assert page.locator("img[src=x]").count() == 0, file
            page.locator("#restore-file button[aria-label=Clear]").last.click()
            error.wait_for(state="detached")


def test_a_visitor_who_leaves_does_not_keep_others_waiting(browser, url, runs):
    """A second visitor gets samples soon after the first, who asked for the longest work there is, closed the page."""
    with Visitor(url) as visitor:
        event = visitor.event("sample-draw", "click")
        long = visitor.usual(event)
        place = visitor.names(event).index
        long[place("sample-steps")], long[place("sample-seeds")] = 100, "0-35"
        long[place("sample-model")] = "fashion-mnist"
        visitor.leave(event, long)
    with Visitor(url) as other:
        answer = other.ask(event, other.usual(event))
        assert answer.done, answer.error
        assert answer.seconds < LONGEST / 2


def test_the_runs_show_their_losses_and_samples(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Runs")
        pictures(page, "runs-losses")
        assert pictures(page, "runs-detail").count("data:image") >= 2
        assert page.locator("img[src=x]").count() == 0


ELSEWHERE = "http://192.0.2.1"  # an address that nobody has
INJECT = f"""() => {{
    window.ran = [], window.refused = [];
    document.addEventListener('securitypolicyviolation', event => refused.push(event.effectiveDirective));
    const add = (tag, values) => document.body.appendChild(Object.assign(document.createElement(tag), values));
    add('script', {{textContent: "ran.push('inline')"}});
    add('div', {{innerHTML: '<img src="data:," onerror="ran.push(`attribute`)">'}});
    for (const tag of ['script', 'img', 'iframe']) add(tag, {{src: '{ELSEWHERE}/x'}});
    fetch('{ELSEWHERE}/x').catch(() => null);
}}"""


@pytest.mark.parametrize("guarded", [True, False])
def test_no_script_that_comes_into_the_page_runs_and_nothing_is_fetched_from_elsewhere(browser, url, guarded):
    """The control is a browser that does not ask for the policy of the page."""
    page = browser.new_context(bypass_csp=not guarded).new_page()
    page.goto(url)
    page.get_by_role("tab", name="Noise", exact=True).wait_for()
    page.evaluate(INJECT)
    page.wait_for_function("refused.length == 6" if guarded else "ran.length == 2")
    ran, refused = page.evaluate("[ran, refused.toSorted()]")
    assert ran == ([] if guarded else ["inline", "attribute"])
    kinds = ["connect-src", "frame-src", "img-src", "script-src-attr", "script-src-elem", "script-src-elem"]
    assert refused == (kinds if guarded else [])
    page.context.close()


def test_no_other_page_may_frame_this_one(browser, url):
    page = browser.new_page()
    page.set_content(f'<iframe src="{url}"></iframe><iframe src="data:text/html,the control"></iframe>')
    page.wait_for_function("frames.length == 2")
    shown = [frame.url.partition(":")[0] for frame in page.frames[1:]]
    assert shown == ["chrome-error", "data"]
    page.close()


# Raw requests --------------------------------------------------------------------------------------------------------


def test_nothing_outside_is_sent(visitor, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("not to be read")
    for path in (secret, "/etc/passwd", f"../../{secret}", "file:///etc/passwd"):
        for place in ("/gradio_api/file=", "/file=", "/gradio_api/file/"):
            answer = visitor.http.get(f"{place}{path}")
            assert answer.status_code in (403, 404), f"{place}{path}"
            assert "not to be read" not in answer.text
    assert visitor.http.get("/").status_code == 200  # which the same visitor may see


def test_a_page_of_another_site_is_not_answered_even_if_its_name_leads_here(visitor, url):
    for host, code in (("127.0.0.1", 200), ("localhost:80", 200), ("evil.example:7860", 403)):
        assert visitor.http.get("/config", headers={"host": host}).status_code == code
    for origin, code in ((url, 200), ("http://evil.example", 403), ("null", 403)):
        answer = visitor.http.post("/gradio_api/upload", files={"files": b"x"}, headers={"origin": origin})
        assert answer.status_code == code, origin


def test_no_event_goes_past_the_queue_and_no_request_is_endless(visitor):
    event = visitor.event("noise-gff-gamma", "change")
    values = visitor.usual(event)
    assert visitor.ask(event, values).done
    body = {"data": values, "fn_index": event["id"], "session_hash": visitor.session}
    for place in ("run/predict", "api/predict", "run/render", "call/render"):
        for prefix in ("/gradio_api/", "/"):
            assert visitor.http.post(f"{prefix}{place}", json=body).status_code in (403, 404, 405)
    assert visitor.join(event, ["x" * 6_000_000, *values[1:]]).status_code == 413


def test_nothing_is_fetched_for_a_visitor(visitor):
    event = visitor.event("forward-file", "change")
    for path in ("http://192.0.2.1/x.png", "file:///etc/passwd"):
        assert visitor.http.get(f"/gradio_api/file={path}").status_code == 403
        assert visitor.join(event, [{"path": path, "meta": {"_type": "gradio.FileData"}}]).status_code == 403
    assert visitor.join(event, [None]).status_code == 200


def test_what_gradio_offers_and_the_page_does_not_need_is_closed(visitor):
    for place in ("proxy=https://hf.co/x", "deep_link?session_hash=x", "run-history/records", "info", "openapi.json"):
        assert visitor.http.get(f"/gradio_api/{place}").status_code == 403, place


def test_uploads_are_bounded_in_size_and_in_number(visitor, monkeypatch, tmp_path):
    assert visitor.http.post("/gradio_api/upload", files={"files": b"small"}).status_code == 200
    many = [("files", (f"{name}.png", bytes(2**23))) for name in range(3)]  # each of which would be let in
    assert visitor.http.post("/gradio_api/upload", files=many).status_code == 413
    endless = visitor.http.post("/gradio_api/upload", content=iter([b"x"]))  # which says no length
    assert endless.status_code == 413
    sent = tmp_path / "sent"
    sent.write_bytes(bytes(2 * gate.BLOCK))
    assert not gate.is_full(tmp_path)
    monkeypatch.setattr(gate, "MOST_BYTES", 2 * gate.BLOCK - 1)
    assert gate.is_full(tmp_path)


def test_every_answer_says_what_a_browser_may_do_with_it(visitor):
    places = ("/", "/config", "/nothing", "/assets/nothing", "/gradio_api/queue/data?session_hash=nobody")
    for place, code in zip(places, (200, 200, 403, 404, 404), strict=True):
        answer = visitor.http.get(place)
        assert answer.status_code == code, place
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert "'unsafe-inline'" not in policy["script-src"]
        assert ("'sha256-" in policy["script-src"]) == (place == "/")


def test_the_name_of_a_session_disturbs_no_other(visitor):
    event = visitor.event("noise-gff-gamma", "change")
    for session in ("a<gradio-sep>b", "x" * 65, None):
        visitor.session = session
        assert visitor.join(event, visitor.usual(event)).status_code == 400
        body = {"session_hash": session, "fn_index": event["id"], "event_id": "x"}
        assert visitor.http.post("/gradio_api/cancel", json=body).status_code == 400
    for body in (b"", b"{", b"[]", b"[" * 4000, b"null"):
        assert visitor.http.post("/gradio_api/cancel", content=body).status_code == 400


FETCHED = {"path": "http://127.0.0.1:9/x", "meta": {"_type": "gradio.FileData"}}
HOSTILE = [None, float("nan"), 1e308, -1, "x" * 10_000, HTML, [], {}, {"path": "/etc/passwd"}, FETCHED, [["a"]], True]


def test_whatever_a_browser_sends_gets_an_answer_or_a_sentence(visitor):
    """One hostile value for each input of each event, in turn; with NIDIFF_HOSTILE each of them."""
    values, many = cycle(HOSTILE), len(HOSTILE) if "NIDIFF_HOSTILE" in os.environ else 1
    short = {"sample-steps": 1, "sample-seeds": "0", "restore-steps": 1, "restore-samples": 2}
    short |= {"compare-first-steps": 1, "compare-second-steps": 2, "compare-seeds": "0-1"}
    for event in visitor.events:
        named = zip(visitor.names(event), visitor.usual(event), strict=True)
        usual = [short.get(name, value) for name, value in named]
        for place in range(len(usual)):
            for value in islice(values, many):
                answer = visitor.ask(event, [*usual[:place], value, *usual[place + 1 :]])
                asked = f"{visitor.names(event)[place]}={str(value)[:20]}"
                assert answer.done or answer.error, asked
                assert "went wrong" not in answer.error, asked  # that would be a bug of ours
