"""Checks rows, index and view of the database that the agent left."""

import sqlite3

db = sqlite3.connect("/app/shop.db")
assert db.execute("select id, email from customers order by id").fetchall() == [
    (1, "ada@x.org"), (2, "bob@x.org"), (4, "cy@x.org"), (6, "dee@x.org"), (8, "eve@x.org")]
assert db.execute("select customer_id, cents from orders order by id").fetchall() == [
    (1, 500), (2, 250), (1, 125), (4, 900), (2, 60), (1, 5), (8, 1), (1, 40), (2, 2)]
assert db.execute("select email, cents from totals order by email").fetchall() == [
    ("ada@x.org", 670), ("bob@x.org", 312), ("cy@x.org", 900), ("eve@x.org", 1)]
assert db.execute("select 1 from sqlite_master where type = 'index' and name = 'customers_email'").fetchone()
try:
    db.execute("insert into customers(email) values ('bob@x.org')")
except sqlite3.IntegrityError:
    pass
else:
    raise AssertionError("a second bob@x.org was accepted")
