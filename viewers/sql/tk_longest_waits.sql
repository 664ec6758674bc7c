-- Which single waits took longest, and who released them? Click an id to jump there. Needs tk_wait.sql.

create or replace perfetto view tk_longest_waits as
select w.id, w.ts, w.dur, w.track_id, w.rank, w.row, w.phase, w.peer, w.late, w.drain, w.rest, s.name as released_by, w.side
from tk_wait w left join slice s on s.id = w.signal_id
order by w.dur desc, w.id
limit 100;

select * from tk_longest_waits;
