import sqlite3

db = sqlite3.connect("/app/shop.db")
db.executescript("create table customers(id integer primary key, email text not null);"
                 "create table orders(id integer primary key, customer_id integer not null, cents integer not null);")
emails = ["Ada@x.org", "bob@x.org", "ada@x.org", "Cy@x.org", "BOB@X.org", "dee@x.org", "ADA@x.org", "eve@x.org"]
db.executemany("insert into customers(email) values (?)", [(e,) for e in emails])
orders = [(1, 500), (2, 250), (3, 125), (4, 900), (5, 60), (7, 5), (8, 1), (3, 40), (2, 2)]
db.executemany("insert into orders(customer_id, cents) values (?, ?)", orders)
db.commit()
