from kvpass.apps.evaluation.tables import markdown


def test_a_table_has_all_columns_and_a_dash_where_there_is_nothing() -> None:
    lines = markdown([{"name": "a", "x": 1.234567, "n": 16384}, {"name": "b", "y": 0.01234}]).splitlines()
    assert lines[0] == "| name | x | n | y |"
    assert lines[1] == "| --- | ---: | ---: | ---: |"
    assert lines[2:] == ["| a | 1.23 | 16,384 | - |", "| b | - | - | 0.0123 |"]
