"""Figure 1: the graphical models of VGPMIL-PR and VGPMIL-PR-I, and of VGPMIL for comparison.

Lengths are in inches: nodes lie on one line per model, plates are rectangles round them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from gpmil.paper.exhibit import Exhibit
from gpmil.show.plots import FONT, INK, MUTED, new_figure

PLACES = {"u": 3.2, "f": 4.55, "m": 5.65, "h": 5.65, "y": 6.85}  # of the nodes, from the left
OBSERVED = "#c8c8c8"
RADIUS = 0.21
INNER, OUTER = 0.13, 0.27  # space between nodes and the plate round them
FOOT, OUTER_FOOT = 0.2, 0.32  # more space below, for the texts of plates
WIDTH, HEIGHT = 7.5, 1.6  # of the figure, of one model


@dataclass(frozen=True)
class Plate:
    """A rectangle round nodes that are repeated."""

    nodes: str
    repeated: str
    space: float = INNER
    room: float = 0.0  # more width on either side, for the text

    def sides(self) -> tuple[float, float]:
        """Left and right."""
        reach = RADIUS + self.space + self.room
        return PLACES[self.nodes[0]] - reach, PLACES[self.nodes[-1]] + reach


@dataclass(frozen=True)
class GraphicalModel:
    """One graphical model: its nodes, what is repeated, and arrows between nodes or plates."""

    heading: str
    formulas: Sequence[str]
    nodes: Mapping[str, str]
    plates: Mapping[str, Plate]
    arrows: Sequence[tuple[str, str]]


INDUCING = Plate("u", r"$m=1,\ldots,M$", room=0.19)
BAGS = r"$b\in\mathcal{B}$"
INSTANCES = r"$i\in b$"

MODELS = (
    GraphicalModel(
        "(a) VGPMIL-PR",
        (
            r"$\mathbf{m}_b\,|\,\mathbf{f}_b\;\sim\;\mathcal{N}(\mathbf{f}_b,\ \mathbf{I})$",
            r"$y_b=1$ if some $m_i>0$, else $0$",
        ),
        {"u": "$u_m$", "f": "$f_i$", "m": "$m_i$", "y": "$y_b$"},
        {"M": INDUCING, "i": Plate("fm", INSTANCES), "b": Plate("fmy", BAGS, OUTER)},
        (("u", "f"), ("f", "m"), ("m", "y")),
    ),
    GraphicalModel(
        "(b) VGPMIL-PR-I",
        (
            r"$\mathbf{m}_b\,|\,\mathbf{f}_b\;\sim\;"
            r"\mathcal{N}(\Sigma_b\mathbf{f}_b,\ \Sigma_b)$",
            r"$\Sigma_b=(\mathbf{I}+\lambda\mathbf{C}_b)^{-1}$",
            r"$y_b=1$ if some $m_i>0$, else $0$",
        ),
        {"u": "$u_m$", "f": "$f_i$", "m": "$m_i$", "y": "$y_b$"},
        {
            "M": INDUCING,
            "if": Plate("f", INSTANCES),
            "im": Plate("m", INSTANCES),
            "b": Plate("fmy", BAGS, OUTER),
        },
        # From plate to plate: every m_i depends on all f_j of its bag.
        (("u", "f"), ("if", "im"), ("m", "y")),
    ),
    GraphicalModel(
        "(c) VGPMIL",
        (
            r"$\mathrm{p}(h_i=1\,|\,f_i)=1/(1+e^{-f_i})$",
            r"$\mathrm{p}(y_b\,|\,\mathbf{h}_b)=H^{G_b}/(H+1)$",
            r"$G_b=1$ if $y_b=\max_i\,h_i$, else $0$",
        ),
        {"u": "$u_m$", "f": "$f_i$", "h": "$h_i$", "y": "$y_b$"},
        {"M": INDUCING, "i": Plate("fh", INSTANCES), "b": Plate("fhy", BAGS, OUTER)},
        (("u", "f"), ("f", "h"), ("h", "y")),
    ),
)


def build() -> Exhibit:
    """Draw the three models, one below the other."""
    tall = HEIGHT * len(MODELS)
    figure = new_figure(WIDTH, tall)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, tall))
    ax.set_axis_off()
    for row, model in enumerate(MODELS):
        _draw(ax, model, tall - HEIGHT * (row + 0.42))
    return Exhibit(
        number="Figure 1",
        slug="figure1_graphical_models",
        title="Graphical models",
        figure=figure,
        alt="Three chains of nodes with plates. VGPMIL-PR: u to f to m to y, f and m in one plate. "
        "VGPMIL-PR-I: the same nodes, f and m in plates of their own, joined by an arrow from "
        "plate to plate. VGPMIL: u to f to h to y.",
        caption="Grey nodes are observed, white ones are not. In VGPMIL-PR (a) each m_i depends on "
        "its own f_i alone. In VGPMIL-PR-I (b) the arrow goes from plate to plate: neighbouring "
        "patches of a bag are coupled, and m_b given f_b does not factorise. VGPMIL (c), which "
        "the paper describes in its text, has binary labels h_i in the place of m_i.",
    )


def _draw(ax: Axes, model: GraphicalModel, y: float) -> None:
    ax.text(0.15, y + 0.36, model.heading, fontsize=FONT + 2, color=INK, weight="bold")
    for line, formula in enumerate(model.formulas):
        _text(ax, 0.15, y + 0.08 - 0.27 * line, formula, FONT + 1, MUTED, "left", "baseline")
    for plate in model.plates.values():
        _draw_plate(ax, plate, y)
    for name, symbol in model.nodes.items():
        colour = OBSERVED if name == "y" else "white"
        ax.add_patch(Circle((PLACES[name], y), RADIUS, facecolor=colour, edgecolor=INK, lw=1.1))
        _text(ax, PLACES[name], y, symbol, FONT + 3, INK, "center", "center")
    for start, end in model.arrows:
        tail, head = _sides(model, start)[1], _sides(model, end)[0]
        ax.add_patch(_arrow((tail, y), (head, y)))


def _sides(model: GraphicalModel, name: str) -> tuple[float, float]:
    """Left and right of a node or plate: where arrows end and begin."""
    if name in model.plates:
        return model.plates[name].sides()
    return PLACES[name] - RADIUS, PLACES[name] + RADIUS


def _draw_plate(ax: Axes, plate: Plate, y: float) -> None:
    left, right = plate.sides()
    reach = RADIUS + plate.space
    # An outer plate keeps clear of the text of the inner one, and has its own below.
    foot = OUTER_FOOT if plate.space > INNER else FOOT
    low = y - reach - foot
    ax.add_patch(
        FancyBboxPatch(
            (left, low),
            right - left,
            2 * reach + foot,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor="none",
            edgecolor=MUTED,
            linewidth=0.9,
        )
    )
    _text(ax, right - 0.07, low + 0.08, plate.repeated, FONT, INK, "right", "baseline")


def _arrow(tail: tuple[float, float], head: tuple[float, float]) -> FancyArrowPatch:
    return FancyArrowPatch(
        tail, head, arrowstyle="-|>", mutation_scale=10, shrinkA=0, shrinkB=0, color=INK, lw=1.1
    )


def _text(
    ax: Axes, x: float, y: float, text: str, size: float, colour: str, ha: str, va: str
) -> None:
    ax.text(x, y, text, fontsize=size, color=colour, ha=ha, va=va, math_fontfamily="cm")
