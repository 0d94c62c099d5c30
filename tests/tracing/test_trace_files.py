"""The files of traces, and advice: of recordings that are written by hand."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from recordings import recording, span, wait

import shardwise
from shardwise.tracing.analysis import advice, summary
from shardwise.tracing.files import draw, page, read_json, write_json
from shardwise.tracing.records import ROWS, Recording, Span, lanes
from shardwise.tracing.trace import Trace


def step(**options: object) -> Recording:
    """Forward of a, b, c: c's all-gather is issued when b begins, and is waited for."""
    spans = [
        span("all-gather", "a", 0, 2, num_bytes=1_500_000),
        span("all-gather", "b", 2, 4, num_bytes=1_500_000),
        wait("all-gather", "a", 0, 2),
        span("computation", "a", 2, 10),
        span("all-gather", "c", 10, 26, num_bytes=1_500_000),
        span("computation", "b", 10, 20),
        wait("all-gather", "c", 20, 26),
        span("copies", "c", 26, 26.5),
        span("computation", "c", 27, 40),
        span("computation", "c", 40, 60, "backward"),
        span("reduce-scatter", "c", 60, 70, "backward", num_bytes=1_500_000),
        wait("reduce-scatter", "c", 60, 70, "backward"),
        span("optimizer", "AdamW", 70, 80, ""),
    ]
    return recording(spans, **options)  # type: ignore[arg-type]


def test_a_table_shows_what_each_group_sent_and_waited_for() -> None:
    assert_expected_inline(
        summary(step()),
        """\
rank 0 (cpu): 80.0 ms, computation 51.0 ms, waits 18.0 ms, all-gather 20.0 ms, reduce-scatter 10.0 ms, copies 0.5 ms, optimizer 10.0 ms
group  unsharded  reduced  MB sent  ms transfers  ms waited  uncovered  ms computed
-----------------------------------------------------------------------------------
a              2        1      1.5           2.0        2.0       100%          8.0
b              2        1      1.5           2.0        0.0         0%         10.0
c              2        1      3.0          26.0       16.0        62%         33.0
-----------------------------------------------------------------------------------
total          6        3      6.0          30.0       18.0        60%         51.0
c waits 6.0 ms for its all-gather in forward: prefetch=2 would cover it (3.0 MB more in memory).
No computation covers 12.0 ms of communication, 15% of the time; most is the reduce-scatter of c in backward, 10.0 ms. Give each rank more samples, send fewer bytes (an mp_policy in bfloat16), or shard smaller modules, so that one computes while another travels.""",
    )


def test_more_prefetch_is_advised_where_nothing_travelled_for_as_long_as_was_waited() -> None:
    # From 4 to 10 ms nothing travels, and c waits for 6 ms: one more group of prefetch begins at 2 ms.
    assert "c waits 6.0 ms for its all-gather in forward: prefetch=2 would cover it" in advice(step())[0]
    busy = [*step().spans, span("reduce-scatter", "x", 5, 6, num_bytes=1)]
    assert "prefetch" not in "".join(advice(recording(busy))), "one ms too few"
    assert "prefetch" not in "".join(advice(step(prefetch=None))), "the caller has chosen what is ahead"
    assert "where no rank is late, prefetch=2" in "".join(advice(step(is_aligned=False)))


def test_several_groups_that_wait_share_a_sentence() -> None:
    spans: list[Span] = []
    for place, name in enumerate("abcdef"):
        at = 20 * place
        spans += [span("all-gather", name, at, at + 8, num_bytes=1), wait("all-gather", name, at + 2, at + 8)]
        spans += [span("computation", name, at + 8, at + 20)]
    assert_expected_inline(
        "\n".join(advice(recording(spans, "abcdef"))),
        """\
b, c and 3 more wait up to 6.0 ms for their all-gathers in forward: prefetch=2 would cover it (3.0 MB more in memory).
No computation covers 6.0 ms of communication, 5% of the time; most is the all-gather of a in forward, 6.0 ms. Give each rank more samples, send fewer bytes (an mp_policy in bfloat16), or shard smaller modules, so that one computes while another travels.""",
    )


def test_the_first_forward_knows_no_order_and_says_so() -> None:
    assert_expected_inline(
        "\n".join(advice(step(knew_order=False))),
        """The first forward of a model records the order of its blocks and unshards nothing ahead: trace a later step to see what usually waits.""",
    )


def test_a_model_compiled_as_a_whole_tells_nothing_and_says_so() -> None:
    assert_expected_inline(
        "\n".join(advice(recording([]))),
        """No module has computed: a model that is compiled as a whole runs as one graph, which a trace cannot see into.""",
    )


def test_spans_that_overlap_lie_in_lanes_of_their_own() -> None:
    one, two, three = span("copies", "a", 0, 5), span("copies", "b", 3, 8), span("copies", "c", 5, 6)
    assert lanes([two, three, one]) == [[one, three], [two]]


# --- JSON -----------------------------------------------------------------------------------------


def test_a_json_file_is_read_again_and_has_what_trace_viewers_expect(tmp_path: Path) -> None:
    write_json([step()], tmp_path / "step.json")
    assert read_json(tmp_path / "step.json") == [step()]
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = [threads[thread] for thread in sorted(threads)]
    assert list(dict.fromkeys(rows)) == [row for row in ROWS if row != "all-reduce"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {(e["name"], e["ts"], e["dur"], threads[e["tid"]]) for e in complete} >= {
        ("forward b", 10_000.0, 10_000.0, "computation"),
        ("wait for all-gather c", 20_000.0, 6_000.0, "computation"),
        ("reduce-scatter c", 60_000.0, 10_000.0, "reduce-scatter"),
        ("optimizer AdamW", 70_000.0, 10_000.0, "optimizer"),
    }
    assert {e["args"]["bytes"] for e in complete if e["cat"] == "all-gather"} == {1_500_000}
    (first, second) = [e for e in events if e["ph"] == "C"]
    assert first["args"]["unsharded parameters"] == 3.0
    assert second["args"]["full gradients"] == 3.0
    for thread in threads:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == thread)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))


def test_traces_of_several_ranks_become_one_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in (1, 0)]
    for rank, path in zip((1, 0), paths, strict=True):
        write_json([step(rank=rank, began=5.0 * rank)], path)
    shardwise.merge_traces(paths, tmp_path / "new" / "all.json")
    first, second = read_json(tmp_path / "new" / "all.json")
    assert (first.rank, second.rank) == (0, 1)
    assert first.spans == second.spans, "both began together, whatever their clocks say"
    shardwise.merge_traces(paths, tmp_path / "all.html")
    assert (tmp_path / "all.html").read_text().count("<h2>rank") == 2


def test_clocks_of_the_day_count_where_ranks_did_not_begin_together(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_json([step(rank=rank, began=5.0 + 0.25 * rank, is_aligned=False)], tmp_path / f"{rank}.json")
    shardwise.merge_traces([tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json")
    first, second = read_json(tmp_path / "all.json")
    assert first == step(rank=0, began=5.0, is_aligned=False)
    assert second.spans[0].start_ns - first.spans[0].start_ns == 250_000_000
    assert second.memory[0].at_ns == 250_000_000
    assert second.end_ns - first.end_ns == 250_000_000


def test_files_that_cannot_be_merged_are_refused(tmp_path: Path) -> None:
    write_json([step()], tmp_path / "0.json")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    cases = {
        "both of rank 0": [tmp_path / "0.json", tmp_path / "0.json"],
        "other.json is not a trace of this library": [tmp_path / "other.json"],
        "no files were given": [],
    }
    for message, paths in cases.items():
        with pytest.raises(ValueError, match=message):
            shardwise.merge_traces(paths, tmp_path / "all.html")
    with pytest.raises(FileNotFoundError):
        shardwise.merge_traces([tmp_path / "none.json"], tmp_path / "all.html")
    with pytest.raises(ValueError, match=r"merge_traces: 'all.svg' ends with '.svg'"):
        shardwise.merge_traces([tmp_path / "0.json"], "all.svg")


def test_other_endings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Trace().save("traces/step.pdf")
    assert_expected_inline(
        str(caught.value),
        """trace.save: 'traces/step.pdf' ends with '.pdf'; a trace is written as .html, .json, .png. Name the file with one of these endings.""",
    )
    with pytest.raises(RuntimeError):
        Trace().save(tmp_path / "new" / "step.html")
    assert not (tmp_path / "new").exists()


# --- the page -------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The tags of a page, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_the_page_needs_no_other_file() -> None:
    text = page([step()])
    tags = Tags(text).tags
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [name for _, attributes in tags for name in attributes if name in ("src", "href")]
    assert re.findall(r"https?://\S+?\"", text) == ['http://www.w3.org/2000/svg"']
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_shows_each_span_where_it_lies() -> None:
    text = page([step()])
    assert "wait for all-gather c (forward): 6.000 ms from 20.000 ms" not in text, "phases are in its label"
    assert "reduce-scatter c (backward): 10.000 ms from 60.000 ms, 1.500 MB" in text
    (block,) = re.findall(r' x="([\d.]+)%" y="\d+" width="([\d.]+)%"[^>]*><title>forward b:', text)
    assert [float(value) for value in block] == [12.5, 12.5]
    assert text.index(">computation<") < text.index(">all-gather<", text.index(">computation<"))
    assert "MB held" in text


def test_the_page_says_what_colours_mean_and_which_rank_a_wait_is_for() -> None:
    late = replace(wait("all-gather", "c", 20, 26), late_rank=3, late_ns=4_000_000)
    text = page([recording([*step().spans, late])])
    assert "wait for all-gather c: 6.000 ms from 20.000 ms, 4.000 ms of it for rank 3" in text
    time, memory = re.findall(r'<p class="legend">(.*?)</p>', text)
    assert re.findall(r"</i>(.*?)</span>", time) == [
        *("forward", "backward", "waits", "all-gather", "reduce-scatter", "all-reduce", "copies", "optimizer")
    ]
    assert "full gradients" in memory
    shown = set(re.findall(r'<rect [^>]*fill="(#\w+)"', text))
    assert shown <= set(re.findall(r"background:(#\w+)", time))
    assert re.findall(r"<button[^>]*>(.*?)</button>", text) == ["Zoom in", "Zoom out", "Fit"]


def test_names_are_escaped_on_the_page() -> None:
    text = page([recording([span("computation", "<b>&", 0, 1)], ["<b>&"])])  # type: ignore[arg-type]
    assert "<b>&" not in text
    assert "&lt;b&gt;&amp;" in text


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_draws_the_page_and_its_script_runs(tmp_path: Path) -> None:
    probe = (
        "<script>const said=[];for(const b of document.querySelectorAll('button')){b.click();said.push(zoom)}"
    )
    probe += "document.title='zoom '+said;document.querySelector('button').click()</script></body>"
    (tmp_path / "step.html").write_text(page([step(), step(rank=1)]).replace("</body>", probe))
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command += ["--virtual-time-budget=1000", "--dump-dom", (tmp_path / "step.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "<title>zoom 2,1,1</title>" in done.stdout, done.stderr
    assert done.stdout.count("width: 200%") == 2
    assert done.stdout.count("<polygon") == page([step(), step(rank=1)]).count("<polygon") > 0


# --- the picture ----------------------------------------------------------------------------------


def test_the_picture_has_a_bar_for_each_span(tmp_path: Path) -> None:
    draw([step(), step(rank=1)]).savefig(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    figure = draw([step(), step(rank=1)])
    rows, memory, *_ = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()][:3] == ["forward", "backward", "waits"]
    bars = [path for collection in rows.collections for path in collection.get_paths()]
    assert len(bars) == len(step().spans)
    assert [tick.get_text() for tick in rows.get_yticklabels()] == [
        *("computation", "all-gather", "reduce-scatter", "copies", "optimizer")
    ]
    assert memory.get_ylim()[1] > 16.5


def test_without_matplotlib_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Install shardwise\[pictures\], or save the trace as .html"):
        draw([step()])
