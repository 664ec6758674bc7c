-- How much of staging hides under the multiplication, by expert and warp? Of sweeps that are on record step by step, as
-- int4 experts have them with `detail`. Needs tk_wait.sql. Same numbers as tracekern.analysis.questions.staging;
-- docs/int4_trace.md says what is hidden and what is exposed.

create or replace perfetto view tk_staging as
with steps as (
  select s.event, s.ts, s.dur, extract_arg(s.arg_set_id, 'debug.group') as channels, own.parent_id as sweep
  from tk_span s
  join slice own on own.id = s.id
  join slice around on around.id = own.parent_id
  where around.name = 'sweep' and s.event in ('stage', 'park', 'decode', 'load_b', 'multiply')
),
in_order as (
  select *, max(iif(event = 'stage', channels, -1)) over (partition by sweep order by ts) as staged from steps
),
by_sweep as (
  select
    sweep,
    sum(iif(event = 'stage', dur, 0)) as stage_ns,
    sum(iif(event = 'park', dur, 0)) as park_ns,
    sum(iif(event = 'decode', dur, 0)) as decode_ns,
    sum(iif(event in ('load_b', 'multiply'), dur, 0)) as multiply_ns,
    sum(iif(event in ('load_b', 'multiply') and staged > channels, dur, 0)) as hidden_ns
  from in_order
  group by sweep
)
select
  w.rank,
  substr(w.phase, 1, length(w.phase) - length('.sweep')) as kernel,
  extract_arg(w.arg_set_id, 'debug.expert') as expert,
  cast(substr(w.row, instr(w.row, 'warp ') + 5) as int) as warp,
  count(*) as sweeps,
  sum(w.dur) as sweep_ns,
  sum(stage_ns) as stage_ns,
  sum(park_ns) as park_ns,
  sum(decode_ns) as decode_ns,
  sum(multiply_ns) as multiply_ns,
  sum(hidden_ns) as hidden_ns,
  100.0 * sum(hidden_ns) / sum(hidden_ns + stage_ns + park_ns + decode_ns) as hidden_percent,
  w.side
from by_sweep b
join tk_span w on w.id = b.sweep
group by w.side, w.rank, kernel, expert, warp
order by w.side, w.rank, kernel, expert, warp;

select * from tk_staging;
