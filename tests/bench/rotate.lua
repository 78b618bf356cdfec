-- For wrk: POST the files named in BENCH_BODIES (one a line), in turn, to BENCH_PATH; one line of JSON at the end.
local bodies = {}
for name in os.getenv("BENCH_BODIES"):gmatch("[^\n]+") do
  local file = assert(io.open(name, "rb"))
  bodies[#bodies + 1] = file:read("*a")
  file:close()
end

wrk.method = "POST"
wrk.path = os.getenv("BENCH_PATH")
wrk.headers["Content-Type"] = os.getenv("BENCH_CONTENT_TYPE")
wrk.body = bodies[1]

-- A request function costs a call of Lua for each request: only where the bodies differ.
if #bodies > 1 then
  local requests, turn = {}, 0
  init = function()
    for number, body in ipairs(bodies) do
      requests[number] = wrk.format(nil, nil, nil, body)
    end
  end
  request = function()
    turn = turn % #requests + 1
    return requests[turn]
  end
end

done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\nSUMMARY {"num_requests": %d, "duration_s": %.6f, "p50_ms": %.4f, "p90_ms": %.4f, "p99_ms": %.4f, '
      .. '"max_ms": %.4f, "num_bad_status": %d, "num_broken": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(90) / 1e3,
    latency:percentile(99) / 1e3, latency.max / 1e3, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
