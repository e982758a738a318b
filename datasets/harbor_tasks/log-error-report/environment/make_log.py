import random

rng = random.Random(11)
months = "Jan Feb Mar".split()
lines = []
for month, day in [(0, 31), (1, 1)]:
    for hour in (22, 23) if day == 31 else (0, 1, 2):
        for _ in range(rng.randrange(30, 60)):
            status = rng.choice([200] * 12 + [301, 404, 499, 500, 502, 503])
            path = rng.choice(["/", "/cart", "/api/500", "/img/a b.png"])
            lines.append(
                f'10.0.{rng.randrange(9)}.{rng.randrange(99)} - - [{day:02d}/{months[month]}/2024:{hour:02d}:'
                f'{rng.randrange(60):02d}:{rng.randrange(60):02d} +0000] "GET {path} HTTP/1.1" {status} {rng.randrange(9999)}'
            )
lines.insert(5, "-- log rotated --")
lines.insert(90, "")
lines.append("[error] worker 503 respawned")
open("/app/access.log", "w").write("\n".join(lines) + "\n")
