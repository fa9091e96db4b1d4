"""The embedded ClickHouse: its engine in one process behind ClickHouse's HTTP interface.

So that telemetry has one code path, a laptop gets a process that answers what a real server would, to
clickhouse-connect and to curl. It is started as ``octavo clickhouse`` and prints one line when it is ready:

    embedded clickhouse ready http://127.0.0.1:8123

It knows nothing of Octavo's tables. What it cannot do it refuses; it never does something else instead.
Results are not compressed and are complete before the first byte is sent. A ``query_id`` is a label that
is sent back, not a handle to a running query.
"""
