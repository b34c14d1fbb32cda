"""The figure of a comparison tells all methods apart."""

from matplotlib.container import ErrorbarContainer

from aespa_pl.report.comparison import Cell, figure
from aespa_pl.settings import CompareSettings


def test_every_method_has_a_look_of_its_own() -> None:
    metrics = {
        "perplexity": {"quantized": {"text": 20.0}},
        "seconds": {"quantization": 4.0},
        "peak_bytes": {"host": 1},
    }
    methods = CompareSettings().methods
    drawn = figure([Cell(method, 2, 0, metrics) for method in methods])
    assert drawn is not None
    points = [each.lines[0] for each in drawn.axes[1].containers if isinstance(each, ErrorbarContainer)]
    looks = {(point.get_color(), point.get_marker()) for point in points}
    assert len(looks) == len(points) == len(methods)
