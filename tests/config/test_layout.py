from stretto import Layout


def test_a_layout_shows_its_sizes_in_a_notebook_and_what_else_is_set() -> None:
    table = Layout(replicas=2, stages=3, blocks=(2, 1, 1))._repr_html_()
    assert "<th>replicas</th><th>stages</th><th>micro_batches</th><th>chunks</th><th>blocks</th></tr>" in table
    assert "<td>2</td><td>3</td><td>1</td><td>1</td><td>(2, 1, 1)</td>" in table
