"""The report in a real browser: every control used, no request, no complaint, readable by everybody."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from dtprof.analysis.results import Caveat, GroupResult, Summary, Timeline, TimelineBar
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.page_dashboard import load_report
from dtprof.report.pages.page_panels import panel_names, render_documents
from tests.browser.conftest import Page, axe_findings
from tests.report.example_closeups import hang_of, source_of
from tests.report.example_summaries import MS, empty_summary, summary_of

pytestmark = pytest.mark.browser

Show = Callable[..., Page]
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
    page = show(source_of(num_ranks=num_ranks, num_steps=50, verdict=hang_of()))
    for tab in page.driver.find_elements(By.CSS_SELECTOR, ".tabs a"):
        tab.click()
        page.wait_for("return document.documentElement.dataset.drawn === arguments[0]", tab.get_attribute("hash")[1:])
        assert page.run("return document.querySelectorAll('.page:not([hidden])').length") == 1
        missing = page.run(
            "return [...document.querySelectorAll('.page:not([hidden]) .plot')]"
            ".filter(p => !p.querySelector('.main-svg') || p.offsetHeight < 100).map(p => p.id)"
        )
        assert missing == []
        assert page.run("return document.documentElement.scrollWidth") <= 1280
    assert len(page.driver.find_elements(By.CSS_SELECTOR, ".tabs a")) == 9
    assert page.run("return document.querySelectorAll('#page-overview .cells button').length") == num_ranks
    bars = page.run("return document.querySelectorAll('#plot-timeline .bars .point path').length")
    assert bars == len(summary_of(num_ranks=num_ranks).timeline.intervals)  # type: ignore[union-attr]
    assert page.complaints() == []
    assert page.requests() == [page.url]


def test_a_run_with_nothing_to_show_says_why_in_every_panel(show: Show) -> None:
    page = show(empty_summary())
    said = page.run("return [...document.querySelectorAll('.nothing')].map(p => p.innerText)")
    assert len(said) >= 4
    assert all(len(sentence) > 20 for sentence in said)
    everywhere = page.run("return [...document.querySelectorAll('.nothing')].map(p => p.textContent)")
    assert len(everywhere) >= 18
    assert all(len(sentence) > 20 for sentence in everywhere)
    assert page.run("return document.querySelectorAll('.plot, svg, canvas').length") == 0
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
    page = show(summary_of(), "#page-timeline")
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


def test_a_long_table_shows_its_first_rows_and_finds_every_other(show: Show) -> None:
    summary = summary_of(num_ranks=40)
    one = summary.collectives[0]
    many = tuple(replace(one, api=f"caller {number}", count=number) for number in range(300))
    page = show(replace(summary, collectives=many))
    rows = "[...document.querySelectorAll('#collectives tbody tr')].filter(r => r.offsetHeight)"
    status = "document.querySelector('#collectives [role=status]').innerText"

    def state() -> tuple[list[str], str]:
        counts, text = page.run(f"return [{rows}.map(r => r.cells[4].innerText), {status}]")
        return counts, text

    assert state() == ([str(number) for number in range(50)], "50 of 300 rows")
    headers = page.driver.find_elements(By.CSS_SELECTOR, "#collectives th button")
    headers[4].click()
    assert state() == ([str(number) for number in range(299, 249, -1)], "50 of 300 rows")
    find = page.driver.find_element(By.CSS_SELECTOR, "#collectives input[type=search]")
    find.send_keys("Caller 11")
    assert state() == ([*map(str, range(119, 109, -1)), "11"], "11 rows found, 300 in all")
    markup = page.run("return document.getElementById('content-collectives').innerHTML.replaceAll('caller 119', 'new')")
    page.driver.execute_async_script(
        "dtprof.update({ collectives: { markup: arguments[0] } }).then(arguments[1])", markup
    )
    assert state() == ([*map(str, range(118, 109, -1)), "11"], "10 rows found, 300 in all"), "an update keeps both"
    find = page.driver.find_element(By.CSS_SELECTOR, "#collectives input[type=search]")
    assert page.driver.switch_to.active_element == find
    find.clear()
    page.driver.find_element(By.CSS_SELECTOR, "#collectives .table-tools button").click()
    assert state() == ([str(number) for number in range(299, -1, -1)], "300 rows")
    numbers = page.run("return [...document.querySelectorAll('.cell-value')].map(c => c.innerText).slice(0, 3)")
    assert all(re.fullmatch(r"\d+(\.\d+)?", text) for text in numbers)
    assert page.run("return document.querySelector('.scale .unit').innerText") == "numbers in %"
    clipped = "[...document.querySelectorAll('.cell-value')].filter(c => c.scrollWidth > c.clientWidth).length"
    assert page.run(f"return {clipped}") == 0
    assert page.run("const c = document.querySelector('.cells'); return c.scrollWidth - c.clientWidth") <= 0
    page.emulate(media="print", width=760)
    assert page.run(f"return {status}") == "300 rows"
    assert not find.is_displayed()
    assert page.complaints() == []


def test_details_unfold_by_keyboard_and_hold_the_numbers_of_the_figure(show: Show) -> None:
    page = show(summary_of())
    for summary in page.driver.find_elements(By.CSS_SELECTOR, "#page-overview details > summary"):
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
    page = show(summary_of(), "#page-timeline")
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
    page = show(summary_of(), "#page-timeline")
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
    page = show(summary_of(), "#page-timeline")
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
    for link in page.driver.find_elements(By.CSS_SELECTOR, "#page-overview nav a"):
        anchor = str(link.get_attribute("hash"))[1:]
        page.run("arguments[0].click()", link)
        page.wait_for(
            "const { top } = document.getElementById(arguments[0]).getBoundingClientRect(); return top > -2;",
            anchor,
        )
    page.open("#timeline:rank=2")
    page.wait_for("return Math.abs(document.getElementById('timeline').getBoundingClientRect().top) < 120")
    assert page.driver.find_element(By.ID, "selected").text == "Rank 2 \u00d7"
    page.open()
    page.driver.find_element(By.CSS_SELECTOR, ".evidence").click()
    assert page.run("return location.hash") == "#stragglers"
    assert not page.run("return document.getElementById('page-stragglers').hidden")
    page.driver.back()
    page.wait_for("return !document.getElementById('page-overview').hidden")


def unfaded(plot: str) -> str:
    """Return JavaScript for the positions of the bars of the first trace that stand out: all, or those with a copy."""
    return f"""(() => {{
      const trace = document.querySelector('#{plot} .barlayer .trace');
      const bars = [...trace.querySelectorAll('.point')];
      if (getComputedStyle(trace).opacity === '1') return bars.map((_, at) => at);
      const copies = [...document.querySelectorAll('#{plot} .chosen-bars .point')].map((copy) => copy.innerHTML);
      return bars.flatMap((bar, at) => copies.includes(bar.innerHTML) ? [at] : []);
    }})()"""


def test_the_tab_of_the_page_at_hand_is_in_view_on_a_phone(show: Show) -> None:
    page = show(summary_of())
    page.emulate(width=390)
    page.open("#page-measurement")
    box = page.run("return document.querySelector('.tabs a[aria-current]').getBoundingClientRect().toJSON()")
    assert 0 <= box["left"] < box["right"] <= 390


def test_a_rank_that_is_chosen_is_marked_everywhere(show: Show) -> None:
    page = show(source_of())
    cells = page.driver.find_elements(By.CSS_SELECTOR, ".cells button")
    cells[2].click()
    page.wait_for(f"return {unfaded('plot-step-parts')}.join() === '2'")
    assert page.run("return location.hash") == "#:rank=2"
    assert page.run("return document.querySelectorAll('#step-parts .numbers tr.marked').length") == 1
    page.run("arguments[0].focus()", cells[2])
    ActionChains(page.driver).send_keys(Keys.ARROW_RIGHT, Keys.ENTER).perform()
    page.wait_for(f"return {unfaded('plot-step-parts')}.join() === '3'")
    page.run("return Plotly.relayout('plot-step-parts', { 'xaxis.range': [0, 50] })")
    page.wait_for(f"return {unfaded('plot-step-parts')}.join() === '3'")
    page.driver.find_element(By.CSS_SELECTOR, ".tabs a[href='#page-memory']").click()
    page.wait_for(f"return {unfaded('plot-memory-categories')}.join() === '3'")
    assert page.run("return location.hash") == "#page-memory:rank=3"
    ActionChains(page.driver).send_keys(Keys.ESCAPE).perform()
    page.wait_for(f"return {unfaded('plot-memory-categories')}.length === 4")
    assert not page.driver.find_element(By.ID, "selected").is_displayed()
    assert page.complaints() == []


def test_of_many_ranks_the_grid_is_one_canvas_that_keys_and_the_pointer_reach(show: Show) -> None:
    page = show(summary_of(num_ranks=320))  # 10 rows of 32
    inside = "return [...document.querySelectorAll('.mosaic *')].map(one => one.tagName).join()"
    assert page.run(inside) == "CANVAS,DIV,DIV", "no element a rank"
    grid = page.driver.find_element(By.CSS_SELECTOR, ".mosaic")
    here = page.driver.find_element(By.CSS_SELECTOR, ".mosaic [role=option]")
    tip = page.driver.find_element(By.CSS_SELECTOR, "#rank-grid .tip")
    page.driver.find_element(By.CSS_SELECTOR, ".picker button[data-metric='compute']").click()
    ActionChains(page.driver).send_keys(Keys.ESCAPE).perform()  # keys were the last: what has the focus is shown
    page.run("arguments[0].focus()", grid)
    ActionChains(page.driver).send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT).perform()
    assert here.get_attribute("aria-label") == "rank 32: compute 90.0\u00a0ms", "nothing is left of a row"
    assert tip.text == "rank 32: compute 90.0 ms"
    assert (here.get_attribute("aria-posinset"), here.get_attribute("aria-setsize")) == ("33", "320")
    ActionChains(page.driver).send_keys(Keys.ENTER).perform()
    assert page.run("return [dtprof.selected, location.hash]") == [32, "#:rank=32"]
    assert here.get_attribute("aria-selected") == "true"
    frame = page.driver.find_element(By.CSS_SELECTOR, ".mosaic-chosen")
    assert frame.rect == here.rect
    ActionChains(page.driver).send_keys(Keys.END, " ").perform()
    assert page.run("return dtprof.selected") == 319
    page.run("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", grid)
    width, height = grid.size["width"], grid.size["height"]
    # The middle of row 3, column 5.
    right, down = round(width * (5.5 / 32 - 0.5)), round(height * (3.5 / 10 - 0.5))
    ActionChains(page.driver).move_to_element_with_offset(grid, right, down).click().perform()
    assert page.run("return dtprof.selected") == 101
    assert tip.text.startswith("rank 101: compute")
    page.run("dtprof.select(null)")
    assert not frame.is_displayed()
    page.run("document.body.replaceChildren(document.querySelector('.mosaic-place'))")  # axe reads all there is
    assert axe_findings(page, ".mosaic-place") == []
    assert page.complaints() == []


def test_cells_of_many_ranks_are_coloured_by_their_share_in_both_themes(show: Show) -> None:
    page = show(summary_of(num_ranks=320))
    corner = (  # of the cell at a position: left of its texts
        "const c = document.querySelector('.mosaic canvas'); const k = c.width / c.clientWidth;"
        "const w = (c.clientWidth + 2) / 32, at = arguments[0];"
        "return [...c.getContext('2d').getImageData(((at % 32) * w + 1) * k, (Math.floor(at / 32) * 34 + 16) * k, 1, 1)"
        ".data.slice(0, 3)]"
    )
    page.driver.find_element(By.CSS_SELECTOR, ".picker button[data-metric='compute']").click()
    # Rank 2 computes longest of all, 140 ms: the dark end of the scale; the others have 90 ms.
    assert page.run(corner, 2) == [0x6F, 0x97, 0xD8]
    light = page.run(corner, 0)
    assert light != [0x6F, 0x97, 0xD8]
    page.emulate(dark=True)
    page.wait_for(corner.replace("return", "const rgb =") + "; return rgb.join() === '63,104,159'", 2)
    assert page.run(corner, 0) != light


def test_the_metric_of_the_grid_is_chosen_and_its_scale_is_said(show: Show) -> None:
    page = show(source_of())
    picker = page.driver.find_element(By.CSS_SELECTOR, ".picker button[data-metric='compute']")
    picker.click()
    values = [cell.text.replace("\u00a0", " ") for cell in page.driver.find_elements(By.CSS_SELECTOR, ".cell-value")]
    assert values == ["90.0 ms", "90.0 ms", "140 ms", "90.0 ms"]
    assert page.driver.find_element(By.CSS_SELECTOR, ".scale").text.replace("\u00a0", " ").split("\n")[-1] == "140 ms"


def test_the_timeline_of_the_run_goes_down_to_one_operation(show: Show) -> None:
    page = show(source_of(bars_each=300), "#page-timeline")
    view = "const c = dtprof.tracks.chartOf('run-timeline'); return [c.t0, c.t1]"
    whole = page.run(view)
    page.run("document.querySelector('.tracks-scroll').focus()")
    seen = [whole]
    for typed in ("+", Keys.ARROW_RIGHT, "+", "-", Keys.ARROW_LEFT):
        ActionChains(page.driver).send_keys(typed).perform()
        assert page.run(view) != seen[-1], typed
        seen.append(page.run(view))
    ActionChains(page.driver).send_keys("0").perform()
    assert page.run(view) == whole
    for button in page.driver.find_elements(By.CSS_SELECTOR, ".tools button"):
        page.run("arguments[0].click()", button)
    # The first forward pass of rank 0 takes 6 ms: from 0 to 60,000 ticks.
    page.run("dtprof.tracks.chartOf('run-timeline').moveTo(0, 60000)")
    scroll = page.driver.find_element(By.CSS_SELECTOR, ".tracks-scroll")
    page.run("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", scroll)
    ActionChains(page.driver).move_to_element_with_offset(scroll, 0, 34 - scroll.size["height"] // 2).perform()
    tip = page.wait_for("const t = document.querySelector('.tip'); return t.hidden ? '' : t.innerText")
    assert tip.startswith("rank 0: forward")
    assert "6\u00a0ms" in tip
    assert page.complaints() == []


def test_a_million_operations_pan_at_twenty_frames_a_second(show: Show) -> None:
    page = show(source_of(num_ranks=64, bars_each=300), "#page-timeline")
    milliseconds = page.run(
        """
        const chart = dtprof.tracks.chartOf("run-timeline");
        const ranks = Array.from({ length: 64 }, (_, rank) => {
          const size = 15625;
          const what = Array.from({ length: size }, (_, i) => i % 3);
          return { rank, begin: Array(size).fill(100), length: Array(size).fill(70), what };
        });
        chart.setData({ ...chart.data, ranks, end: 1562600, steps: [] });
        const times = [];
        for (const share of [1, 0.7, 0.3, 0.1, 0.01]) for (let i = 0; i < 4; i++) {
          chart.moveTo(1000 * i, 1000 * i + 1562600 * share);
          const begin = performance.now();
          chart.paint();
          chart.canvas.getContext("2d").getImageData(0, 0, 1, 1);
          times.push(performance.now() - begin);
        }
        return times.sort((a, b) => a - b)[times.length >> 1];
        """
    )
    assert milliseconds <= 50


def test_documents_that_arrive_later_keep_zoom_and_selection(show: Show) -> None:
    page = show(source_of(), "#page-timeline")
    page.run("dtprof.select(1); dtprof.tracks.chartOf('run-timeline').moveTo(0, 60000)")
    key(page, "plot-timeline", "+")
    page.wait_for("return document.getElementById('plot-timeline').layout.xaxis.range[0] > 1")
    zoomed = range_of(page, "plot-timeline")
    source = source_of(num_steps=30, bars_each=400)
    documents = render_documents(source, load_report(panel_names()))
    sent = {anchor: {"markup": one.markup, "drawing": one.drawing} for anchor, one in documents.items()}
    failed = page.driver.execute_async_script(
        "const done = arguments[1]; dtprof.update(arguments[0]).then(() => done(), (error) => done(String(error)))",
        sent,
    )
    assert failed is None
    assert page.run("return document.querySelector('#run-timeline figcaption').innerText").startswith("2.66")
    assert range_of(page, "plot-timeline") == zoomed
    assert page.run("const c = dtprof.tracks.chartOf('run-timeline'); return [c.t0, c.t1]") == [0, 60000]
    assert page.run("return dtprof.selected") == 1
    assert page.complaints() == []


def test_no_title_of_an_axis_is_cut_on_a_phone(show: Show) -> None:
    page = show(source_of())
    page.emulate(width=375)
    try:
        for name in ("overview", "timeline", "collectives"):
            page.open(f"#page-{name}")
            cut = page.run(
                "return [...document.querySelectorAll('.page:not([hidden]) .js-plotly-plot')].flatMap((plot) => {"
                "const { left, right } = plot.getBoundingClientRect();"
                "return [...plot.querySelectorAll('.xtitle')].filter((one) =>"
                " one.getBoundingClientRect().left < left - 1"
                "|| one.getBoundingClientRect().right > right + 1).map((one) => one.textContent)})"
            )
            assert cut == [], name
    finally:
        page.emulate()


@pytest.mark.parametrize(
    "names",
    [("overview", "hang"), ("timeline", "pipeline"), ("collectives", "memory"), ("stragglers", "measurement")],
    ids=" ".join,
)
def test_no_serious_finding_of_axe(show: Show, names: tuple[str, ...]) -> None:
    page = show(source_of(verdict=hang_of()))
    for name in names:
        page.open(f"#page-{name}")
        assert axe_findings(page) == [], name


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
    assert page.run("return [...document.querySelectorAll('details.numbers')].every((one) => one.open)")
    assert page.run("return document.querySelectorAll('.page[hidden]').length") == 0
    assert page.run("return [...document.querySelectorAll('.plot')].every(plot => plot.hidden)")
    assert page.complaints() == []


def evil_summary() -> Summary:
    """Return a run in which every name is an attack."""
    summary = summary_of(num_ranks=2)
    interval = TimelineBar(
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
        hook=EVIL,
        groups=(GroupResult(name="0", description=EVIL, ranks=(0, 1), axis=EVIL),),
        ranks=tuple(replace(rank, step_ns=None, partition_ns=None) for rank in summary.ranks),
        collectives=tuple(replace(collective, op=EVIL, api=EVIL) for collective in summary.collectives),
        timeline=Timeline(
            first_step=1, last_step=1, origin_ns=0, end_ns=MS, intervals=(interval, prototype), left_out=0
        ),
        cannot_tell=(Caveat("", EVIL), Caveat("steps", EVIL)),
    )


def test_injected_text_is_text_everywhere(show: Show) -> None:
    page = show(evil_summary())
    assert page.complaints() == []
    assert page.requests() == [page.url]
    assert page.run("return document.querySelectorAll('img, main script, header script, svg a, svg image').length") == 0
    assert EVIL in page.run("return document.title") or EVIL.split("/")[-1] in page.run("return document.title")
    assert EVIL in page.driver.find_element(By.CSS_SELECTOR, ".command-line").text
    assert EVIL in page.driver.find_element(By.CSS_SELECTOR, ".sentence").text
    cells = page.run("return [...document.querySelector('#collectives tbody tr').cells].map(cell => cell.textContent)")
    assert cells[0] == cells[1] == cells[3] == EVIL
    page.open("#page-timeline")
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
    for wanted in ("theme", "plot-step-parts", "plot-step-times", "plot-bandwidth", "compute"):
        assert wanted in reached


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(source_of, "overview"), (source_of, "pipeline"), (empty_summary, "overview"), (evil_summary, "overview")],
)
def test_text_stands_out_from_its_ground(
    show: Show, make: Callable[[], Summary | Source], name: str, dark: bool
) -> None:
    page = show(make())
    page.emulate(dark=dark)
    page.open(f"#page-{name}")
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
          !['SCRIPT', 'NOSCRIPT'].includes(e.tagName) && e.checkVisibility() && !e.closest('.bars, .cells') &&
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
