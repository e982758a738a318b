#!/bin/sh
# The file must have these keys in this order, and sh must read these values back.
reward=1
[ "$(cut -d= -f1 /app/service.env 2>/dev/null | tr '\n' ' ')" = "DB_PASSWORD DB_POOL_SIZE DB_POOL_TIMEOUT DB_URL HTTP_HOSTS HTTP_MAX_BODY HTTP_PORT HTTP_TLS MOTD TRACING_SAMPLE_RATE TRACING_TAGS " ] || reward=0
got=$(env -i sh -c '. /app/service.env && printf "%s\n" "$DB_PASSWORD" "$DB_POOL_SIZE" "$DB_POOL_TIMEOUT" "$DB_URL" "$HTTP_HOSTS" "$HTTP_MAX_BODY" "$HTTP_PORT" "$HTTP_TLS" "$MOTD" "$TRACING_SAMPLE_RATE" "[$TRACING_TAGS]"' 2>/dev/null)
[ "$got" = "$(cat /tests/expected.txt)" ] || reward=0
grep -q "^HTTP_PORT=8080$" /app/service.env 2>/dev/null || reward=0
echo "$reward" > /logs/verifier/reward.txt
