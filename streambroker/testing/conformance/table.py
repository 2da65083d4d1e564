"""Shared tables."""

from __future__ import annotations

import threading

from .kit import Engines, name


class TestTable:
    def test_rows_are_seen_by_all(self, engines: Engines) -> None:
        key, first, second = name("table"), engines().table, engines().table
        assert dict(first(key).rows()) == {}
        assert first(key).put("a", "1") is True
        assert first(key).put("é\n\x00", "ü {}") is True
        assert dict(second(key).rows()) == {"a": "1", "é\n\x00": "ü {}"}

    def test_put_tells_whether_it_changed(self, engines: Engines) -> None:
        table = engines().table(name("table"))
        assert table.put("a", "") is True
        assert table.put("a", "") is False
        assert table.put("a", "2") is True
        assert dict(table.rows()) == {"a": "2"}

    def test_delete(self, engines: Engines) -> None:
        table = engines().table(name("table"))
        for row in "abc":
            table.put(row, row)
        assert table.delete(["a", "c", "x"]) == 2
        assert table.delete(["a"]) == 0
        assert table.delete([]) == 0
        assert dict(table.rows()) == {"b": "b"}

    def test_a_change_elsewhere_is_seen_at_once(self, engines: Engines) -> None:
        key = name("table")
        mine, other = engines().table(key), engines().table(key)
        for number in range(10):
            other.put("a", str(number))
            assert dict(mine.rows()) == {"a": str(number)}
        other.delete(["a"])
        assert dict(mine.rows()) == {}

    def test_an_older_view_is_enough_when_asked_so(self, engines: Engines) -> None:
        key = name("table")
        mine, other = engines().table(key), engines().table(key)
        other.put("a", "1")
        assert dict(mine.rows()) == {"a": "1"}
        other.put("a", "2")
        assert dict(mine.rows(max_age=3600)) in ({"a": "1"}, {"a": "2"})
        assert dict(mine.rows(max_age=0)) == {"a": "2"}

    def test_own_changes_are_never_missed(self, engines: Engines) -> None:
        table = engines().table(name("table"))
        table.rows()
        table.put("a", "1")
        assert dict(table.rows(max_age=3600)) == {"a": "1"}
        table.delete(["a"])
        assert dict(table.rows(max_age=3600)) == {}

    def test_tables_are_kept_apart(self, engines: Engines) -> None:
        key, engine = name("table"), engines()
        names = [key, key + ":a", key + ".a", key.upper(), key + "{x}", key + " é"]
        for each in names:
            engine.table(each).put("name", each)
        for each in names:
            assert dict(engine.table(each).rows()) == {"name": each}

    def test_many_writers(self, engines: Engines) -> None:
        key, reader = name("table"), engines()
        tables = [engines().table(key) for _ in range(3)]
        threads = [threading.Thread(target=lambda t=table, n=number: [t.put(f"{n}.{i}", str(i)) for i in range(20)])
                   for number, table in enumerate(tables)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(reader.table(key).rows()) == 60
