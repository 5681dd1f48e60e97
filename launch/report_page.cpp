#include "launch/report_page.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "core/base/error.h"
#include "launch/svg_chart.h"

namespace shoal {

namespace {

struct Rgb {
  double r, g, b;
};

std::string css(const Rgb& c) {
  return fmt::format("#{:02x}{:02x}{:02x}", std::lround(c.r), std::lround(c.g), std::lround(c.b));
}

Rgb mix(const Rgb& a, const Rgb& b, double t) {
  return {a.r + (b.r - a.r) * t, a.g + (b.g - a.g) * t, a.b + (b.b - a.b) * t};
}

// Colour at t (0..1) between equidistant stops.
template <size_t N>
Rgb between(const std::array<Rgb, N>& stops, double t) {
  const double position = t * (N - 1);
  const auto i = std::min(static_cast<size_t>(position), N - 2);
  return mix(stops[i], stops[i + 1], position - static_cast<double>(i));
}

// Diverging: blue (too little) - neutral (balanced) - red (too much). In the dark theme neutral is dark.
constexpr std::array<Rgb, 5> kHeatLight = {
    {{33, 90, 165}, {120, 174, 214}, {244, 243, 240}, {240, 150, 105}, {170, 20, 40}}};
constexpr std::array<Rgb, 5> kHeatDark = {
    {{110, 185, 255}, {52, 104, 165}, {44, 48, 56}, {186, 84, 52}, {255, 160, 110}}};

std::string heat_rules(const std::array<Rgb, 5>& stops, const char* dead) {
  std::string rules = fmt::format(".h0{{fill:{0};background:{0}}}", dead);
  for (int i = 0; i < kHeatLevels; i++) {
    const auto colour = css(between(stops, i / static_cast<double>(kHeatLevels - 1)));
    rules += fmt::format(".h{0}{{fill:{1};background:{1}}}", i + 1, colour);
  }
  return rules;
}

constexpr const char* kLightVariables =
    "--bg:#f6f7f9;--card:#fff;--ink:#1c2128;--muted:#5b6470;--line:#dfe3e8;--axis:#8b95a1;--link:#1f5fae;"
    "--c0:#2a6fbb;--c1:#d9641e;--c2:#2e9260;--c3:#b5338a;--c4:#8a6d0b;--c5:#5b4fc4;--c6:#0f8b9c;--c7:#c0392b;"
    "--r0:#3b1f73;--r1:#28688f;--r2:#1f978a;--r3:#63b84f;--r4:#c9b51b;";
constexpr const char* kDarkVariables =
    "--bg:#14171b;--card:#1c2026;--ink:#e6e9ed;--muted:#9aa4b0;--line:#30363e;--axis:#6d7783;--link:#7db4f0;"
    "--c0:#64a8f0;--c1:#f5924e;--c2:#5cc48c;--c3:#e77cc0;--c4:#d3b445;--c5:#a298f5;--c6:#4cc3d4;--c7:#f07a6c;"
    "--r0:#8f7ae0;--r1:#5aa2d8;--r2:#3fc2b0;--r3:#93d86f;--r4:#f2dd4e;";

constexpr const char* kStyle = R"css(
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5
  system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:19px;margin:38px 0 6px}
h3{font-size:16px;margin:24px 0 6px}
p{margin:4px 0 12px;max-width:80ch}
.sub,.note,.empty,small{color:var(--muted)}
.note{font-size:12.5px;margin:4px 4px 0}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:16px;align-items:start}
figure,.card{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px 10px}
.card{overflow-x:auto}
figcaption{margin:0 2px 4px}
figcaption small{margin-left:4px;font-size:13px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;font-family:inherit}
.tick{fill:var(--muted);font-variant-numeric:tabular-nums}
.label{fill:var(--muted)}
.grid{stroke:var(--line);fill:none}
.axis{stroke:var(--axis);fill:none}
.line path,.dots path,.faint path{fill:none;stroke:var(--c);stroke-linejoin:round;stroke-linecap:round}
.line path{stroke-width:1.8}
.faint path{stroke-width:1;opacity:.32}
.dots path{stroke-width:1.3;stroke-dasharray:4 4}
.dots circle{fill:var(--card);stroke:var(--c);stroke-width:1.8}
.line circle,.faint circle{fill:var(--c)}
.cells{shape-rendering:crispEdges}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;margin:2px 2px 4px;color:var(--muted)}
.legend i{display:inline-block;width:16px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.key{display:flex;flex-wrap:wrap;align-items:center;gap:6px 22px;font-size:13px;color:var(--muted);margin:6px 0 14px}
.key>span{display:flex;align-items:center;gap:8px}
.key i{display:inline-block;width:16px;height:14px}
.key .bar{display:flex}
.key .bar i{width:11px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:5px 18px 5px 4px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
tr:last-child>*{border-bottom:0}
tbody th{font-weight:400;color:var(--muted);white-space:nowrap}
thead th{font-weight:600;white-space:nowrap}
.mark,thead i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:8px;vertical-align:-1px}
td small{margin-left:4px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,210px),1fr));gap:1px;
  background:var(--card);border:1px solid var(--line);border-radius:10px;overflow:hidden}
.tiles div{box-shadow:0 0 0 1px var(--line);padding:9px 14px}
.tiles span{display:block;font-size:12.5px;color:var(--muted)}
.tiles b{font-weight:600;font-size:18px;font-variant-numeric:tabular-nums}
.tiles small{font-weight:400;font-size:12px}
details{margin-top:14px}
summary{cursor:pointer;color:var(--link)}
code{font:13px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.warn{border-left:4px solid var(--c1);padding:6px 12px;background:var(--card);margin:12px 0;border-radius:0 8px 8px 0}
#tip{position:fixed;pointer-events:none;background:var(--card);border:1px solid var(--axis);border-radius:8px;
  padding:6px 10px;font-size:12.5px;line-height:1.45;display:none;z-index:9;box-shadow:0 3px 12px #0003;
  font-variant-numeric:tabular-nums}
#tip i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:6px}
@media print{body{font-size:12px}main{max-width:none;padding:0}figure,.card,tr{break-inside:avoid}
  h2,h3{break-after:avoid}.grid2{grid-template-columns:1fr 1fr;gap:10px}#tip{display:none!important}}
)css";

// Reads the points back from the drawn paths, so that the page carries no second copy of the data.
constexpr const char* kScript = R"js(
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  const nums = (svg, name) => svg.dataset[name].split(" ").map(Number);
  const text = v => Math.abs(v) >= 1e5 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  for (const svg of document.querySelectorAll("svg.chart")) {
    const [x0, x1, px0, px1] = nums(svg, "x"), [y0, y1, py0, py1, log] = nums(svg, "y");
    let lines = null;
    const read = () => [...svg.querySelectorAll("g.line,g.dots")].map(g => ({
      name: g.dataset.name, colour: g.style.getPropertyValue("--c"),
      points: [...g.firstChild.getAttribute("d").matchAll(/[ML]([\d.-]+) ([\d.-]+)/g)].map(m => [+m[1], +m[2]])}));
    const rule = document.createElementNS("http://www.w3.org/2000/svg", "path");
    rule.setAttribute("class", "axis");
    svg.append(rule);
    svg.addEventListener("mousemove", event => {
      lines ??= read();
      const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      let best = null;
      for (const l of lines) for (const p of l.points)
        if (best === null || Math.abs(p[0] - at) < Math.abs(best - at)) best = p[0];
      if (best === null) return;
      tip.replaceChildren();
      const head = document.createElement("b"), step = x0 + (best - px0) / (px1 - px0) * (x1 - x0);
      head.textContent = svg.dataset.xlabel + " " + text(Math.round(step));
      tip.append(head);
      for (const l of lines) {
        let p = null;
        for (const q of l.points) if (p === null || Math.abs(q[0] - best) < Math.abs(p[0] - best)) p = q;
        if (p === null || Math.abs(p[0] - best) > 6) continue;
        const t = (p[1] - py0) / (py1 - py0), row = document.createElement("div"), mark = document.createElement("i");
        mark.style.background = l.colour;
        row.append(mark, l.name + "  " + text(log ? y0 * Math.pow(y1 / y0, t) : y0 + t * (y1 - y0)));
        tip.append(row);
      }
      rule.setAttribute("d", `M${best} ${py1}V${py0}`);
      tip.style.display = "block";
      const w = tip.offsetWidth, h = tip.offsetHeight;
      tip.style.left = (event.clientX + 16 + w > innerWidth ? event.clientX - 16 - w : event.clientX + 16) + "px";
      tip.style.top = Math.max(4, Math.min(event.clientY + 12, innerHeight - h - 4)) + "px";
    });
    svg.addEventListener("mouseleave", () => { tip.style.display = "none"; rule.removeAttribute("d"); });
  }
})();
)js";

}  // namespace

std::string html_page(const std::string& title, const std::string& body) {
  const std::string light =
      std::string(":root{color-scheme:light;") + kLightVariables + "}" + heat_rules(kHeatLight, "#0b1f3f");
  const std::string dark =
      std::string(":root{color-scheme:dark;") + kDarkVariables + "}" + heat_rules(kHeatDark, "#fff");
  return str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
             "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>",
             html_escape(title), "</title>\n<style>\n", light,
             "\n@media screen and (prefers-color-scheme:dark){", dark, "}", kStyle,
             "</style>\n</head>\n<body>\n<main>\n", body, "</main>\n<script>", kScript,
             "</script>\n</body>\n</html>\n");
}

std::string run_colour(size_t i) {
  return fmt::format("var(--c{})", i % kNumRunColours);
}

std::string ramp_colour(size_t i, size_t n) {
  constexpr size_t kStops = 5;
  const double position = n > 1 ? static_cast<double>(i) / static_cast<double>(n - 1) * (kStops - 1) : 0;
  const auto stop = std::min(static_cast<size_t>(position), kStops - 2);
  const double share = (position - static_cast<double>(stop)) * 100;
  if (share < 0.5) return fmt::format("var(--r{})", stop);
  if (share > 99.5) return fmt::format("var(--r{})", stop + 1);
  return fmt::format("color-mix(in oklab,var(--r{}) {:.0f}%,var(--r{}))", stop, 100 - share, stop + 1);
}

std::string heat_legend() {
  std::string bar;
  for (int i = 0; i < kHeatLevels; i++) bar += fmt::format("<i class=\"h{}\"></i>", i + 1);
  return "<div class=\"key\"><span>load / mean load:</span><span>&le; 1/4<span class=\"bar\">" + bar +
         "</span>&ge; 4</span><span>middle: 1 (balanced), logarithmic</span><span><i class=\"h0\"></i>no "
         "token at "
         "all</span></div>\n";
}

}  // namespace shoal
