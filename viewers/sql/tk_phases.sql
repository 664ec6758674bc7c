-- How long does each phase take? Kernel and event, with quantiles over single spans. Needs tk_wait.sql.
-- Quantiles are linear between the two nearest spans, as in numpy and tracekern.analysis.

create or replace perfetto view tk_phases as
with ordered as (
  select
    phase, class, dur,
    row_number() over (partition by phase order by dur) - 1 as place,
    count(*) over (partition by phase) as n
  from tk_span
),
wanted as (
  select *, 0.5 * (n - 1) as at50, 0.99 * (n - 1) as at99 from ordered
)
select
  phase, class, n as spans, sum(dur) as total_ns, max(dur) as max_ns,
  sum(iif(place = cast(at50 as int), dur * (1 - (at50 - cast(at50 as int))), 0)
    + iif(place = cast(at50 as int) + 1, dur * (at50 - cast(at50 as int)), 0)) as p50_ns,
  sum(iif(place = cast(at99 as int), dur * (1 - (at99 - cast(at99 as int))), 0)
    + iif(place = cast(at99 as int) + 1, dur * (at99 - cast(at99 as int)), 0)) as p99_ns
from wanted
group by phase
order by total_ns desc;

select * from tk_phases;
