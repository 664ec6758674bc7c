-- Every wait, taken apart: how long until its sender was there (late), how long the sender's stores drained, and the rest.
--   id, ts, dur, track_id   of the slice, so that the UI can jump to it
--   rank, row, phase, peer  who waited, where, in which kernel and event, for whom; peer is null where it is unknown
--   signal_id               the signal that arrived last; null where the trace has none
--   released_by             the same in words, also where the trace has no arrow for it
--   late, drain, rest       they add up to dur; late and drain are null without a signal
--   start_up                1 where its launch came before the first iteration of its rank, else null
--   side                    which of two captures side by side, as `tracekern diff` writes them; '' where there is one
-- Waits that never ended are left out. Same numbers as tracekern.analysis.waits for data and credit channels.
-- A rank is a row right below the one at the top, named `rank 0 ...` or, of two captures, `A rank 0 ...`; its warps are
-- at most three rows below it (blocks, block, warp). Where ranks are on several nodes, `@NODE` follows the rank.

create or replace perfetto view tk_track as
with unmarked as (
  select
    id, parent_id,
    iif(name glob 'longest wait: * · *' or name glob 'released it: * · *', substr(name, instr(name, ' · ') + 3), name) as name
  from track
),
named as (
  select
    t.id as track_id,
    iif(p.name glob 'block *', p.name || ' ' || t.name, t.name) as row,
    case
      when p.id is null then null
      when g.id is null then t.name
      when q.id is null then p.name
      when q.parent_id is null then g.name
      else q.name
    end as label
  from unmarked t
  left join unmarked p on p.id = t.parent_id
  left join unmarked g on g.id = p.parent_id
  left join unmarked q on q.id = g.parent_id
),
placed as (
  select *, iif(' ' || label glob '* rank [0-9]*', instr(' ' || label, ' rank '), null) as place from named
)
select
  track_id,
  row,
  cast(substr(label, place + 5) as int) as rank,
  iif(place > 0 and label glob '* @*', substr(label, instr(label, ' @') + 2, instr(substr(label || ' ', instr(label, ' @') + 2), ' ') - 1), null) as node,
  coalesce(trim(substr(label, 1, place - 1)), '') as side
from placed;

create or replace perfetto view tk_span as
select
  s.id, s.ts, s.dur, s.track_id, s.name as event, s.category as class, t.rank, t.row, t.side, s.arg_set_id,
  coalesce(substr(launch, 1, named - 2) || '.', '') || s.name as phase,
  cast(substr(launch, named + 1) as int) as iteration
from (select *, length(rtrim(launch, '0123456789')) as named from (select *, extract_arg(arg_set_id, 'debug.launch') as launch from slice)) s
join tk_track t using (track_id)
where s.category in ('work', 'wait', 'signal', 'sync') and s.dur > -1
  and extract_arg(s.arg_set_id, 'debug.open') is null;

create or replace perfetto view tk_wait as
with
released as (
  select wait.id as wait_id, signal.id as signal_id, signal.ts as s0, iif(s.category = 'flow', wait.ts + wait.dur, signal.ts + signal.dur) as s1, signal.track_id as source
  from flow f
  join slice s on s.id = f.slice_out
  join slice r on r.id = f.slice_in
  join slice signal on signal.id = iif(s.category = 'flow', s.parent_id, s.id)
  join slice wait on wait.id = r.parent_id
),
last as (
  select *, row_number() over (partition by wait_id order by s1 desc, signal_id desc) as place from released
)
select
  w.id, w.ts, w.dur, w.track_id, w.rank, w.row, w.phase, w.iteration,
  coalesce(t.rank, extract_arg(w.arg_set_id, 'debug.peer')) as peer,
  l.signal_id,
  min(max(l.s0 - w.ts, 0), w.dur) as late,
  min(max(l.s1 - w.ts, 0), w.dur) - min(max(l.s0 - w.ts, 0), w.dur) as drain,
  w.dur - coalesce(min(max(l.s1 - w.ts, 0), w.dur), 0) as rest,
  extract_arg(w.arg_set_id, 'debug.released_by') as released_by,
  w.side,
  extract_arg(w.arg_set_id, 'debug.start_up') as start_up
from tk_span w
left join last l on l.wait_id = w.id and l.place = 1
left join tk_track t on t.track_id = l.source
where w.class = 'wait';

select * from tk_wait order by dur desc limit 100;
