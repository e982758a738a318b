#!/bin/bash
set -euo pipefail
python3 - <<'PY'
import sqlite3

db = sqlite3.connect("/app/shop.db")
db.executescript("""
begin;
update orders set customer_id = (
  select min(k.id) from customers k join customers c on lower(k.email) = lower(c.email) where c.id = orders.customer_id);
delete from customers where id not in (select min(id) from customers group by lower(email));
update customers set email = lower(email);
create unique index customers_email on customers(email collate nocase);
create view totals as select email, sum(cents) as cents from customers join orders on customer_id = customers.id group by customers.id;
commit;
""")
PY
