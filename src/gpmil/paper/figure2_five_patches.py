"""Figure 2: the image of five patches, its coupling matrix C_b, and what the coupling does."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from gpmil.coupling.operator import Coupling
from gpmil.data.graphs import adjacency_from_coords, laplacian
from gpmil.paper.exhibit import Exhibit, panels
from gpmil.show.plots import FONT, INK, MUTED, NEGATIVE, POSITIVE

COORDS = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])  # P1, ..., P5
OFFSETS = np.array([0, len(COORDS)])
ADJACENCY = adjacency_from_coords(COORDS, OFFSETS, graph="grid4", step=1.0)
STRENGTHS = (0.5, 10.0)
DIVERGING = LinearSegmentedColormap.from_list("coupling", [NEGATIVE, "white", POSITIVE])

Matrix = Float[np.ndarray, "n n"]


def coupling_matrix() -> Matrix:
    """C_b of the five patches: sum over contiguous i < j of (m_i - m_j)^2 = m^T C_b m."""
    return laplacian(ADJACENCY).toarray()


def covariance(strength: float) -> Matrix:
    """Sigma_b = (I + lambda C_b)^-1, eq. (mgf_ising)."""
    identity = torch.eye(len(COORDS), dtype=torch.float64)
    return Coupling(ADJACENCY, OFFSETS, strength).apply(identity).numpy()


def build() -> Exhibit:
    """The layout of the patches, C_b, and Sigma_b for a weak and a strong coupling."""
    matrix = coupling_matrix()
    names = [f"P{i + 1}" for i in range(len(COORDS))]
    figure, ((layout, first, *others),) = panels(10.0, 2.95, 1, 2 + len(STRENGTHS))
    _draw_layout(layout, names)
    _draw_matrix(first, matrix, names, "{:.0f}", r"$\mathbf{C}_b$")
    for ax, strength in zip(others, STRENGTHS):
        heading = rf"$\Sigma_b=(\mathbf{{I}}+\lambda\mathbf{{C}}_b)^{{-1}},\ \lambda={strength:g}$"
        _draw_matrix(ax, covariance(strength), names, "{:.2f}", heading)
    low, high = (covariance(strength) for strength in STRENGTHS)
    return Exhibit(
        number="Figure 2",
        slug="figure2_five_patches",
        title="An image of five patches and its coupling",
        frame=pd.DataFrame(matrix.astype(int), columns=names).assign(patch=names)[
            ["patch", *names]
        ],
        figure=figure,
        alt="Five squares, P1 and P2 above P3, P4 and P5, with lines between neighbours; the "
        "matrix C_b; and its Sigma_b for weak and strong coupling.",
        caption="Lines join contiguous patches. C_b, computed by gpmil.data.graphs, is the paper's "
        "matrix: the number of neighbours on the diagonal, −1 for each of them. Sigma_b spreads "
        "f_b over the bag, E[m_b] = Sigma_b f_b. Its rows sum to one, so every m_i is a weighted "
        "mean of the f_j and a constant f_b is left as it is. At λ = "
        f"{STRENGTHS[0]:g} a patch keeps {_percent(low.diagonal())} of its own value; at λ = "
        f"{STRENGTHS[1]:g} it keeps {_percent(high.diagonal())}, all weights come near "
        f"1/{len(COORDS)}, and the bag moves as one. Orange is positive, blue negative, on a "
        "scale of its own in each matrix.",
    )


def _percent(share: Float[np.ndarray, " n"]) -> str:
    return f"{100 * share.min():.0f} to {100 * share.max():.0f} %"


def _draw_layout(ax: Axes, names: list[str]) -> None:
    for corner, name in zip(COORDS, names):
        ax.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor=MUTED, linewidth=1.2))
        x, y = corner + 0.25
        ax.text(x, y, rf"$P_{name[1:]}$", fontsize=FONT + 2, color=INK, ha="center", va="center")
    i, j = np.nonzero(np.triu(coupling_matrix() < 0))
    centres = COORDS + 0.5
    for start, end in zip(centres[i], centres[j]):
        ax.plot(*zip(start, end), "o-", color=NEGATIVE, markersize=4, linewidth=1.4)
    # y grows downwards, as in an image.
    ax.set(xlim=(-0.1, 3.1), ylim=(2.1, -0.1), aspect="equal")
    ax.set_title("five patches", fontsize=FONT + 1, color=INK)
    ax.set_axis_off()


def _draw_matrix(ax: Axes, matrix: Matrix, names: list[str], style: str, heading: str) -> None:
    largest = np.abs(matrix).max()
    # Half the range of colours: the numbers stay readable on the strongest.
    ax.imshow(matrix, cmap=DIVERGING, vmin=-2 * largest, vmax=2 * largest)
    for (i, j), value in np.ndenumerate(matrix):
        text = style.format(value).replace("-", "−")
        ax.text(j, i, text, fontsize=FONT, ha="center", va="center", color=INK)
    ticks = range(len(names))
    ax.set_xticks(ticks, labels=names, fontsize=FONT - 1, color=MUTED)
    ax.set_yticks(ticks, labels=names, fontsize=FONT - 1, color=MUTED)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_title(heading, fontsize=FONT + 1, color=INK, math_fontfamily="cm")
