"""Charts: each is a Figure with .show() and .save("x.html")."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlens.viz.html import document, escape, write

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mmlens.layers import LayerProfile
    from mmlens.scores import HeadScores, HeadSet

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
INK, SOFT, LINE = "#1b2330", "#5b6676", "#e3e7ee"
# Okabe-Ito like, told apart by colour-blind readers and in grey.
COLORS = {
    "top": "#d1495b",
    "layer_matched": "#0b6e8f",
    "random": "#8a97a8",
    "bottom": "#edae49",
    "top_question": "#6a4c93",
}
NAMES = {
    "top": "top by RAM (naming word)",
    "layer_matched": "layer-matched others",
    "random": "random others",
    "bottom": "bottom by RAM",
    "top_question": "top by RAM (whole question)",
}


@dataclass(frozen=True)
class Figure:
    """A chart; shows itself in notebooks and saves as one self-contained HTML file."""

    title: str
    plotly: go.Figure = field(repr=False)

    def data(self) -> dict[str, Any]:
        """The chart as plain data for a page."""
        return json.loads(self.plotly.to_json())

    def save(self, path: str | Path) -> Path:
        """Write one HTML file that opens anywhere, offline."""
        body = f'<main><section><h2>{escape(self.title)}</h2><div class="chart" id="chart"></div></section></main>'
        page = document(self.title, body, libraries=("plotly",), charts={"chart": self.data()}, patterns={})
        return write(path, page)

    def show(self) -> None:
        """Show in a notebook or a browser."""
        self.plotly.show()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.plotly._repr_mimebundle_(**options)


def _layout(**more: Any) -> dict[str, Any]:
    return {
        "template": "none",
        "font": {"family": FONT, "size": 13, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"font": {"family": FONT}},
        **more,
    }


def head_map(scores: HeadScores, *, mark: HeadSet | None = None) -> Figure:
    """Layers x heads, each cell a head's score with its interval on hover; `mark` outlines some heads."""
    import plotly.graph_objects as go

    values, (low, high) = scores.values, scores.interval
    metric = str(scores.provenance.get("metric", "score"))
    query = str(scores.provenance.get("query", ""))
    hover = [
        [
            f"layer {a}, head {b}<br>{metric} {values[a, b]:.3f} ({low[a, b]:.3f} to {high[a, b]:.3f})"
            for b in range(values.shape[1])
        ]
        for a in range(values.shape[0])
    ]
    finite = values[np.isfinite(values)]
    chart = go.Figure(
        go.Heatmap(
            z=[[float(v) if np.isfinite(v) else None for v in row] for row in values],
            text=hover,
            hovertemplate="%{text}<extra></extra>",
            colorscale=[[0, "#f4f7fa"], [0.25, "#b9dbe3"], [0.55, "#4a9ab3"], [0.8, "#125d7a"], [1, "#062f45"]],
            zmin=min(0.0, float(finite.min())) if finite.size else 0,
            zmax=float(finite.max()) if finite.size else 1,
            xgap=2,
            ygap=2,
            colorbar={"title": {"text": metric.upper(), "side": "top"}, "thickness": 12, "outlinewidth": 0, "len": 0.9},
        )
    )
    shapes = [
        {
            "type": "rect",
            "x0": b - 0.5,
            "x1": b + 0.5,
            "y0": a - 0.5,
            "y1": a + 0.5,
            "line": {"color": COLORS["top"], "width": 2.5},
        }
        for a, b in (mark or ())
    ]
    axis = {"showgrid": False, "zeroline": False, "ticks": "", "dtick": 1 if max(values.shape) <= 16 else None}
    chart.update_layout(
        _layout(
            xaxis={"title": {"text": "head"}, **axis},
            yaxis={"title": {"text": "layer"}, **axis},
            shapes=shapes,
            margin={"l": 52, "r": 8, "t": 12, "b": 46},
            height=60 + max(240, 38 * values.shape[0]),
        )
    )
    title = f"{metric.upper()} of every head" + (f", query: {query}" if query else "")
    return Figure(title, chart)


def layer_lines(profile: LayerProfile, metric: str) -> Figure:
    """One line for each module over the layers, with the bootstrap interval as a band."""
    import plotly.graph_objects as go

    mean, (low, high) = profile.values(metric), profile.interval(metric)
    chart = go.Figure()
    layers = list(range(mean.shape[1]))
    for m, module in enumerate(profile.modules):
        color = {"attn": COLORS["layer_matched"], "mlp": COLORS["top"]}[module]
        chart.add_scatter(
            x=layers + layers[::-1],
            y=[*high[m].tolist(), *low[m][::-1].tolist()],
            fill="toself",
            fillcolor=color,
            opacity=0.18,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
        told = [
            f"{module}, layer {i}<br>{metric} {mean[m, i]:.4f} ({low[m, i]:.4f} to {high[m, i]:.4f})" for i in layers
        ]
        chart.add_scatter(
            x=layers,
            y=mean[m].tolist(),
            name={"attn": "attention", "mlp": "MLP"}[module],
            mode="lines+markers",
            line={"color": color, "width": 2.5},
            text=told,
            hovertemplate="%{text}<extra></extra>",
        )
    chart.update_layout(
        _layout(
            xaxis={"title": {"text": "layer"}, "gridcolor": LINE, "dtick": 1 if len(layers) <= 16 else None},
            yaxis={"title": {"text": metric}, "gridcolor": LINE, "zerolinecolor": LINE},
            legend={"orientation": "h", "y": 1.1},
            margin={"l": 60, "r": 12, "t": 12, "b": 46},
            height=340,
        )
    )
    tokens = profile.provenance.get("tokens", "all")
    return Figure(f"{metric} by layer, over the tokens: {tokens}", chart)


def dose_curve(
    curves: dict[str, list[tuple[int, list[float]]]],
    *,
    title: str,
    chance: float,
    alone: dict[str, tuple[int, list[float]]] | None = None,
    legend: bool = True,
) -> Figure:
    """Accuracy after cutting k heads: a line through the means, every draw a dot.

    Parameters
    ----------
    curves
        {kind: [(k, accuracy of each draw), ...]}.
    chance
        Drawn as a dotted line.
    alone
        Kinds that were run at one k only.
    legend
        Draw title and legend inside the chart; a page may have its own.
    """
    import plotly.graph_objects as go

    chart = go.Figure()
    most = max(k for points in curves.values() for k, _ in points)
    for kind, points in curves.items():
        x = [k for k, _ in points]
        chart.add_scatter(
            x=x,
            y=[float(np.mean(v)) for _, v in points],
            mode="lines",
            name=NAMES[kind],
            line={
                "color": COLORS[kind],
                "width": 3 if kind == "top" else 2,
                "dash": "solid" if kind == "top" else "dot",
            },
            legendgroup=kind,
            hoverinfo="skip",
        )
        dots = [(k, a) for k, values in points for a in values]
        _dots(chart, kind, dots, show=False)
    for kind, (k, values) in (alone or {}).items():
        _dots(chart, kind, [(k, a) for a in values], show=True)
    chart.add_hline(
        y=chance,
        line={"color": SOFT, "width": 1, "dash": "dash"},
        annotation={"text": "chance", "font": {"size": 11, "color": SOFT}},
        annotation_position="bottom left",
    )
    chart.update_layout(
        _layout(
            title={"text": title, "font": {"size": 15}, "x": 0, "xanchor": "left"} if legend else None,
            showlegend=legend,
            xaxis={
                "title": {"text": "heads cut"},
                "gridcolor": LINE,
                "zeroline": False,
                "range": [-0.04 * most, 1.04 * most],
            },
            yaxis={
                "title": {"text": "accuracy"},
                "gridcolor": LINE,
                "zeroline": False,
                "range": [-0.02, 1.05],
                "tickformat": ".0%",
            },
            margin={"l": 58, "r": 10, "t": 40 if legend else 10, "b": 120 if legend else 48},
            legend={"orientation": "h", "y": -0.3, "x": 0, "font": {"size": 12}},
            height=430 if legend else 330,
        )
    )
    return Figure(title, chart)


def _dots(chart: go.Figure, kind: str, dots: list[tuple[int, float]], *, show: bool) -> None:
    chart.add_scatter(
        x=[k for k, _ in dots],
        y=[a for _, a in dots],
        mode="markers",
        name=NAMES[kind],
        legendgroup=kind,
        showlegend=show,
        marker={
            "color": COLORS[kind],
            "size": 9 if show else 7,
            "symbol": "diamond" if show else "circle",
            "opacity": 0.8,
            "line": {"color": "white", "width": 1},
        },
        hovertemplate=f"{NAMES[kind]}<br>%{{x}} heads cut: %{{y:.1%}}<extra></extra>",
    )
