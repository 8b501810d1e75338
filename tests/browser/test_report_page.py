"""The report in a real browser: every control used, no request, no complaint, readable by everybody."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from dtprof.analysis.results import GroupResult, Interval, Summary, Timeline
from tests.browser.conftest import Page
from tests.figures.example_summaries import MS, empty_summary, summary_of

pytestmark = pytest.mark.browser

Show = Callable[[Summary], Page]
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)><b>&lt;i&gt;</b> $x$ %{y} '\""


def key(page: Page, element_id: str, *keys: str) -> None:
    """Put the focus on an element and type."""
    page.run("document.getElementById(arguments[0]).focus()", element_id)
    ActionChains(page.driver).send_keys(*keys).perform()


def range_of(page: Page, plot: str) -> list[float]:
    found = page.run("return document.getElementById(arguments[0]).layout.xaxis.range", plot)
    return [round(float(end), 3) for end in found]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 64])
def test_every_figure_is_drawn_without_a_complaint_and_without_a_request(show: Show, num_ranks: int) -> None:
    page = show(summary_of(num_ranks=num_ranks, num_steps=50))
    drawn = page.run("return [...document.querySelectorAll('.plot')].map(p => [p.id, !!p.querySelector('.main-svg')])")
    assert drawn == [
        ["plot-step-parts", True],
        ["plot-step-times", True],
        ["plot-timeline", True],
        ["plot-step-phases", True],
    ]
    bars = page.run("return document.querySelectorAll('#plot-timeline .bars .point path').length")
    assert bars == len(summary_of(num_ranks=num_ranks).timeline.intervals)  # type: ignore[union-attr]
    assert page.complaints() == []
    assert page.requests() == [page.url]


def test_a_run_with_nothing_to_show_says_why_in_every_panel(show: Show) -> None:
    page = show(empty_summary())
    said = page.run("return [...document.querySelectorAll('.nothing')].map(p => p.innerText)")
    assert len(said) == 6
    assert all(len(sentence) > 20 for sentence in said)
    assert page.run("return document.querySelectorAll('.plot, svg').length") == 0
    assert page.complaints() == []
    assert page.requests() == [page.url]


def test_the_policy_stops_requests_and_scripts_that_are_not_the_page_s_own(show: Show) -> None:
    page = show(summary_of(num_ranks=1))
    outcome = page.driver.execute_async_script(
        "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('sent'), () => done('refused'))"
    )
    assert outcome == "refused"
    assert any("Content Security Policy" in line for line in page.complaints())
    page.run(
        "const script = document.createElement('script'); script.textContent = 'window.ran = true';"
        "document.body.append(script); document.body.insertAdjacentHTML('beforeend',"
        ' \'<img src=x onerror="window.ran = true"><p onclick="window.ran = true" id=trap>x</p>\');'
        "document.getElementById('trap').click()"
    )
    assert page.run("return window.ran") is None


def test_the_theme_follows_the_system_and_the_button(show: Show) -> None:
    page = show(summary_of())
    ground = "return getComputedStyle(document.body).backgroundColor"
    bar = "return getComputedStyle(document.querySelector('#plot-step-parts .point path')).fill"
    light, light_bar = page.run(ground), page.run(bar)
    page.emulate(dark=True)
    dark = page.wait_for(
        "const now = getComputedStyle(document.body).backgroundColor; return now !== arguments[0] && now", light
    )
    page.wait_for(f"return (() => {{ {bar} }})() !== arguments[0]", light_bar)
    button = page.driver.find_element(By.ID, "theme")
    assert button.text == "Theme: system"
    button.click()
    assert button.text == "Theme: light"
    assert page.run(ground) == light
    page.wait_for(f"return (() => {{ {bar} }})() === arguments[0]", light_bar)
    key(page, "theme", Keys.ENTER)
    assert button.text == "Theme: dark"
    assert page.run(ground) == dark
    page.open()
    assert page.driver.find_element(By.ID, "theme").text == "Theme: dark"
    key(page, "theme", Keys.SPACE)
    assert page.driver.find_element(By.ID, "theme").text == "Theme: system"
    assert page.complaints() == []


def test_changing_the_theme_keeps_zoom_and_what_is_hidden(show: Show) -> None:
    page = show(summary_of())
    key(page, "plot-timeline", "+")
    page.wait_for("return document.getElementById('plot-timeline').layout.xaxis.range[0] > 1")
    zoomed = range_of(page, "plot-timeline")
    page.driver.find_element(By.CSS_SELECTOR, "#timeline .legend button").click()
    key(page, "theme", Keys.ENTER, Keys.ENTER)
    page.wait_for("return document.getElementById('plot-timeline').layout.font.color === '#e7ebf1'")
    assert range_of(page, "plot-timeline") == zoomed
    assert page.run("return document.getElementById('plot-timeline').data[0].visible") is False


def test_print_is_light_even_in_the_dark(show: Show) -> None:
    page = show(summary_of())
    page.emulate(dark=True)
    page.wait_for("return document.getElementById('plot-step-parts').layout.font.color === '#e7ebf1'")
    page.emulate(dark=True, media="print")
    page.wait_for("return document.getElementById('plot-step-parts').layout.font.color === '#000'")
    assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("return getComputedStyle(document.querySelector('nav')).display") == "none"


def test_tables_sort_by_click_and_by_keyboard_and_keep_the_unknown_last(show: Show) -> None:
    page = show(summary_of())

    def column(number: int) -> list[str]:
        texts: list[str] = page.run(
            "return [...document.querySelectorAll('#collectives tbody tr')].map(r => r.cells[arguments[0]].innerText)",
            number,
        )
        return texts

    headers = page.driver.find_elements(By.CSS_SELECTOR, "#collectives th button")
    assert [header.text for header in headers][:3] == ["operation", "group", "ranks"]
    durations = next(i for i, header in enumerate(headers) if header.text == "duration (ms)")
    headers[durations].click()
    assert column(durations) == ["25.0", "0.30", "\u2013"]
    page.run("arguments[0].focus()", headers[durations])
    ActionChains(page.driver).send_keys(Keys.ENTER).perform()
    assert column(durations) == ["0.30", "25.0", "\u2013"]
    sorted_by = page.run("return [...document.querySelectorAll('#collectives th')].map(h => h.ariaSort)")
    assert [state for state in sorted_by if state] == ["ascending"]
    headers[0].click()
    assert column(0) == ["all_reduce", "barrier", "broadcast"]
    headers[0].click()
    assert column(0) == ["broadcast", "barrier", "all_reduce"]
    sizes = next(i for i, header in enumerate(headers) if header.text == "size")
    headers[sizes].click()
    assert [text.replace("\u00a0", " ") for text in column(sizes)] == ["25.0 MiB", "4.00 KiB", "0 B"]


def test_details_unfold_by_keyboard_and_hold_the_numbers_of_the_figure(show: Show) -> None:
    page = show(summary_of())
    for summary in page.driver.find_elements(By.CSS_SELECTOR, "details > summary"):
        page.run("arguments[0].focus()", summary)
        ActionChains(page.driver).send_keys(Keys.ENTER).perform()
        assert page.run("return arguments[0].parentElement.open", summary)
    rows = page.run("return [...document.querySelectorAll('#step-parts .numbers tbody tr')].map(r => r.innerText)")
    assert rows[2].split() == ["2", "200", "140", "20", "10", "10", "12", "8"]
    terms = page.run("return [...document.querySelectorAll('#step-parts .help dt')].map(d => d.innerText)")
    assert "exposed wait" in terms


def test_the_legend_hides_and_shows_by_keyboard(show: Show) -> None:
    page = show(summary_of())
    buttons = page.driver.find_elements(By.CSS_SELECTOR, "#step-parts .legend button")
    assert [button.text for button in buttons][:3] == ["compute", "exposed transfer", "exposed wait"]
    for pressed, visible in (("false", False), ("true", True)):
        page.run("arguments[0].focus()", buttons[0])
        ActionChains(page.driver).send_keys(Keys.SPACE).perform()
        assert buttons[0].get_attribute("aria-pressed") == pressed
        assert page.run("return document.getElementById('plot-step-parts').data[0].visible") is visible


def test_the_timeline_moves_by_keys_and_comes_back(show: Show) -> None:
    page = show(summary_of())
    plot = "plot-timeline"
    assert range_of(page, plot) == [0, 600]
    for typed, expected in (
        ("+", [120, 480]),
        (Keys.ARROW_RIGHT, [192, 552]),
        (Keys.ARROW_LEFT, [120, 480]),
        ("-", [0, 600]),
        (Keys.ARROW_RIGHT, [120, 720]),
        ("0", [0, 600]),
    ):
        key(page, plot, typed)
        page.wait_for(
            "const [a, b] = document.getElementById(arguments[0]).layout.xaxis.range;"
            "return Math.abs(a - arguments[1]) < 0.01 && Math.abs(b - arguments[2]) < 0.01",
            plot,
            *expected,
        )


def test_the_timeline_zooms_by_wheel_with_ctrl_and_by_dragging(show: Show) -> None:
    page = show(summary_of())
    page.run("document.getElementById('plot-timeline').scrollIntoView({ block: 'center', behavior: 'instant' })")
    area = page.driver.find_element(By.CSS_SELECTOR, "#plot-timeline .nsewdrag")
    wheel = (
        "const box = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent(new WheelEvent('wheel', "
        "{ deltaY: -100, ctrlKey: arguments[1], clientX: box.left + box.width / 2, bubbles: true, cancelable: true }))"
    )
    page.run(wheel, area, False)
    assert range_of(page, "plot-timeline") == [0, 600]
    page.run(wheel, area, True)
    assert range_of(page, "plot-timeline") == pytest.approx([75, 525], abs=1)
    ActionChains(page.driver).move_to_element(area).click_and_hold().move_by_offset(120, 0).release().perform()
    page.wait_for("return document.getElementById('plot-timeline').layout.xaxis.range[0] > 290")
    ActionChains(page.driver).move_to_element(area).double_click().perform()
    page.wait_for("return Math.abs(document.getElementById('plot-timeline').layout.xaxis.range[0]) < 1")


def test_the_buttons_of_the_timeline_send_nothing_anywhere(show: Show) -> None:
    page = show(summary_of())
    titles = page.run("return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title || b.ariaLabel)")
    assert titles
    assert not [title for title in titles if "cloud" in title.lower() or "share" in title.lower()]
    for button in page.driver.find_elements(By.CSS_SELECTOR, "#plot-timeline .modebar-btn"):
        page.run("arguments[0].dispatchEvent(new MouseEvent('click', { bubbles: true }))", button)
    assert page.requests() == [page.url]


def test_hovering_a_bar_tells_what_it_is(show: Show) -> None:
    page = show(summary_of())
    bar = page.driver.find_elements(By.CSS_SELECTOR, "#plot-step-parts .point path")[0]
    page.run("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", bar)
    ActionChains(page.driver).move_to_element(bar).perform()
    text = page.wait_for("return document.querySelector('#plot-step-parts .hoverlayer')?.textContent")
    assert "rank 0: compute" in text
    assert "90.0\u00a0ms" in text


def test_deep_links_lead_to_their_panel(show: Show) -> None:
    page = show(summary_of())
    for link in page.driver.find_elements(By.CSS_SELECTOR, "nav a"):
        anchor = str(link.get_attribute("href")).partition("#")[2]
        page.run("arguments[0].click()", link)
        top = page.run("return document.getElementById(arguments[0]).getBoundingClientRect().top", anchor)
        assert -1 <= top < 900, anchor
    page.open("#timeline")
    page.wait_for("return Math.abs(document.getElementById('timeline').getBoundingClientRect().top) < 60")
    page.driver.find_element(By.CSS_SELECTOR, ".evidence").click()
    assert page.run("return location.hash") == "#stragglers"


def test_a_browser_that_cannot_unpack_shows_the_tables_and_says_so(show: Show) -> None:
    page = show(summary_of(num_ranks=1))
    script = page.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "delete window.DecompressionStream"}
    )
    try:
        page.open()
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert "lacks DecompressionStream" in page.driver.find_element(By.ID, "notice").text
    assert page.run("return document.querySelectorAll('details.numbers[open]').length") == 4
    assert page.run("return [...document.querySelectorAll('.plot')].every(plot => plot.hidden)")
    assert page.complaints() == []


def evil_summary() -> Summary:
    """Return a run in which every name is an attack."""
    summary = summary_of(num_ranks=2)
    interval = Interval(
        rank=0, lane="communication", name=EVIL, kind=EVIL, begin_ns=0, end_ns=MS, label=f"{EVIL}\nline two {EVIL}"
    )
    prototype = replace(interval, kind="constructor", rank=1)
    return replace(
        summary,
        run=f"runs/{EVIL}",
        command=("torchrun", EVIL),
        hosts=(EVIL,),
        backend=EVIL,
        torch=EVIL,
        tap=EVIL,
        groups=(GroupResult(name="0", description=EVIL, ranks=(0, 1), axis=EVIL),),
        ranks=tuple(replace(rank, ended="finished" if rank.rank else EVIL) for rank in summary.ranks),
        collectives=tuple(replace(one, op=EVIL, api=EVIL) for one in summary.collectives),
        timeline=Timeline(
            first_step=1, last_step=1, origin_ns=0, end_ns=MS, intervals=(interval, prototype), left_out=0
        ),
        cannot_tell=(EVIL, f"steps: {EVIL}"),
    )


def test_injected_text_is_text_everywhere(show: Show) -> None:
    page = show(evil_summary())
    assert page.complaints() == []
    assert page.requests() == [page.url]
    assert page.run("return document.querySelectorAll('img, main script, header script, svg a, svg image').length") == 0
    assert EVIL in page.run("return document.title") or EVIL.split("/")[-1] in page.run("return document.title")
    assert EVIL in page.driver.find_element(By.CSS_SELECTOR, ".command-line").text
    assert f"rank 0 {EVIL}" in page.driver.find_element(By.CSS_SELECTOR, ".sentence").text
    cells = page.run("return [...document.querySelector('#collectives tbody tr').cells].map(cell => cell.textContent)")
    assert cells[0] == cells[1] == cells[3] == EVIL
    legend = page.run("return [...document.querySelectorAll('#timeline .legend button')].map(b => b.textContent)")
    assert legend == [EVIL, "constructor"]
    assert EVIL in page.run("return document.querySelector('#cannot-tell').textContent")
    assert EVIL in page.run("return document.querySelector('#timeline .numbers').textContent")
    bar = page.driver.find_elements(By.CSS_SELECTOR, "#plot-timeline .point path")[0]
    page.run("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", bar)
    ActionChains(page.driver).move_to_element(bar).perform()
    lines = page.wait_for(
        "const lines = [...document.querySelectorAll('#plot-timeline .hoverlayer tspan.line')].map(l => l.textContent);"
        "return lines.length && lines"
    )
    assert lines == [EVIL, f"line two {EVIL}"]
    assert page.run("return document.querySelectorAll('#plot-timeline .hoverlayer [style*=bold]').length") == 0


@pytest.mark.parametrize("width", [400, 800, 1280, 1920])
def test_the_page_never_scrolls_sideways(show: Show, width: int) -> None:
    page = show(replace(evil_summary(), run="x" * 300))
    page.emulate(width=width)
    page.open()
    assert page.run("return document.documentElement.scrollWidth") <= width


# What a user with a screen reader, a keyboard or weak eyes meets.


def test_headings_names_and_ids_are_in_order(show: Show) -> None:
    page = show(summary_of())
    levels = page.run("return [...document.querySelectorAll('h1, h2, h3, h4')].map(h => h.tagName)")
    assert levels[0] == "H1"
    assert set(levels[1:]) == {"H2"}
    assert page.run("return document.documentElement.lang") == "en"
    nameless = page.run(
        "return [...document.querySelectorAll('button, a, summary, [tabindex=\"0\"], section, nav')].filter(e => "
        "!(e.ariaLabel || e.getAttribute('aria-labelledby') || e.textContent.trim() || e.dataset.title)).length"
    )
    assert nameless == 0
    repeated = page.run(
        "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size"
    )
    assert repeated == 0
    unscoped = page.run("return document.querySelectorAll('th:not([scope])').length")
    assert unscoped == 0
    assert page.run("return [...document.querySelectorAll('table')].every(table => table.caption)")


def test_everything_can_be_reached_by_tab(show: Show) -> None:
    page = show(summary_of())
    page.run("document.activeElement.blur()")
    reached: list[str] = []
    for _ in range(120):
        ActionChains(page.driver).send_keys(Keys.TAB).perform()
        name = page.run("const e = document.activeElement; return e.id || e.className || e.textContent.slice(0, 30)")
        if name in reached[:1] and len(reached) > 20:
            break
        reached.append(name)
    assert reached[0] == "skip"
    for wanted in ("theme", "plot-step-parts", "plot-step-times", "plot-timeline", "plot-step-phases", "compute"):
        assert wanted in reached


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("make", [summary_of, empty_summary, evil_summary])
def test_text_stands_out_from_its_ground(show: Show, make: Callable[[], Summary], dark: bool) -> None:
    page = show(make())
    page.emulate(dark=dark)
    page.open()
    weak = page.run(
        """
        const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
          .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
        const ground = (e) => {
          for (; e; e = e.parentElement) {
            const rgb = parse(getComputedStyle(e).backgroundColor);
            if (rgb.length < 4 || rgb[3] === 1) return rgb;
          }
          return [255, 255, 255];
        };
        for (const details of document.querySelectorAll('details')) details.open = true;
        return [...document.querySelectorAll('body *')].filter((e) =>
          !['SCRIPT', 'NOSCRIPT'].includes(e.tagName) && e.checkVisibility() &&
          [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())
        ).map((e) => {
          const style = getComputedStyle(e);
          const colour = e instanceof SVGElement ? style.fill : style.color;
          const [a, b] = [luminance(parse(colour)), luminance(ground(e))].sort((x, y) => y - x);
          const large = parseFloat(style.fontSize) >= 24;
          return [(a + 0.05) / (b + 0.05) / (large ? 3 / 4.5 : 1), e.textContent.slice(0, 40), colour];
        }).filter(([contrast]) => contrast < 4.5);
        """
    )
    assert weak == []
