from kvpass.apps.evaluation.tables import PrintedTable, markdown


def test_a_table_has_all_columns_and_a_dash_where_there_is_nothing() -> None:
    lines = markdown([{"name": "a", "x": 1.234567, "n": 16384}, {"name": "b", "y": 0.01234}]).splitlines()
    assert lines[0] == "| name | x | n | y |"
    assert lines[1] == "| --- | ---: | ---: | ---: |"
    assert lines[2:] == ["| a | 1.23 | 16,384 | - |", "| b | - | - | 0.0123 |"]


def test_a_printed_table_fills_up_below_its_first_row() -> None:
    table = PrintedTable(9)
    assert table.lines({"policy": "picky", "error": "needs aligner"}) == ["picky: needs aligner"]
    head, rule, first = table.lines({"policy": "h2o", "perplexity": 2.71828, "n": None})
    assert head == "policy     perplexity       n"
    assert rule == "---------  ----------  ------"
    assert first == "h2o              2.72       -"
    (second,) = table.lines({"policy": "streaming", "perplexity": 1234.5})
    assert second == "streaming       1,234       -"
    assert [row["policy"] for row in table.rows] == ["h2o", "streaming"]
