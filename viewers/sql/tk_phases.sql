-- How long does each phase take? Kernel and event, with quantiles over single spans. Needs tk_wait.sql.
-- Quantiles are linear between the two nearest spans, as in numpy and tracekern.analysis. Spans whose begin a flight
-- recorder overwrote count in the total, from the oldest record of their row on, and in no quantile.

create or replace perfetto view tk_phases as
with ordered as (
  select
    side, phase, dur,
    row_number() over (partition by side, phase order by dur) - 1 as place,
    count(*) over (partition by side, phase) as n
  from tk_span
  where extract_arg(arg_set_id, 'debug.begin_overwritten') is null
),
wanted as (
  select *, 0.5 * (n - 1) as at50, 0.99 * (n - 1) as at99 from ordered
),
quantiles as (
  select
    side, phase,
    sum(iif(place = cast(at50 as int), dur * (1 - (at50 - cast(at50 as int))), 0)
      + iif(place = cast(at50 as int) + 1, dur * (at50 - cast(at50 as int)), 0)) as p50_ns,
    sum(iif(place = cast(at99 as int), dur * (1 - (at99 - cast(at99 as int))), 0)
      + iif(place = cast(at99 as int) + 1, dur * (at99 - cast(at99 as int)), 0)) as p99_ns
  from wanted
  group by side, phase
)
select s.phase, s.class, count(*) as spans, sum(s.dur) as total_ns, max(s.dur) as max_ns, q.p50_ns, q.p99_ns, s.side
from tk_span s
left join quantiles q using (side, phase)
group by s.side, s.phase
order by total_ns desc;

select * from tk_phases;
