package history

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"example.com/redislock"
	"github.com/anishathalye/porcupine"
)

// BadOrder is the kind of a violation of the model: what the lockers said of a key has no order that explains it.
const BadOrder = "not linearizable"

// Linearizability is what the model of one key says of a history.
type Linearizability struct {
	Pieces     int // of the history, each one key's for a while, and each checked on its own
	Operations int // in all of them
	Largest    int // operations in one piece
	Unknown    int // pieces given up for lack of time
	Violations []Violation

	drawings []drawing
}

type drawing struct {
	model porcupine.Model
	info  porcupine.LinearizationInfo
}

// Draw writes a page for a browser into dir for each of the first pieces that violate the model.
func (l Linearizability) Draw(dir string) error {
	var failed []error
	for i, d := range l.drawings {
		failed = append(failed, porcupine.VisualizePath(d.model, d.info, filepath.Join(dir, fmt.Sprintf("not-linearizable-%d.html", i+1))))
	}
	return errors.Join(failed...)
}

const (
	pieceSize = 20 // operations, after which a piece ends as soon as none is under way
	pieceTime = 2 * time.Second
	drawn     = 5 // pieces

	rounding = int64(5 * time.Millisecond)   // of Redis's clock
	poll     = int64(250 * time.Millisecond) // of one who waits in place, at most
	always   = int64(math.MinInt64)
	never    = int64(math.MaxInt64)
)

// CheckModel asks of each key whether what the lockers said of it (acquired, held by that task, done by that task, released,
// lost to another) has an order that a Redis key with a TTL allows. The history is in the order of its stamps.
//
// A lock may go by itself only from a moment for which the history has a reason: its holder was lost, abandoned, killed or
// stopped, or slow to release it, or Redis forgot the key. What may have happened without anybody saying so (an acquire whose
// reply was lost, a marker whose reply was, a thief) is believed once a locker names it, and only in its time.
func CheckModel(history []Record, terms Terms) Linearizability {
	m := newModeler(history, terms)
	var result Linearizability
	for _, key := range sortedKeys(m.keys) {
		m.keys[key].check(key, &result)
	}
	return result
}

// life is a lock's time at its key, then its marker's, as far as the history can tell.
type life struct {
	by        string // whose
	process   string // where
	believed  int64  // until when its Locker takes it for its own
	task      string // as others see it
	asked     int64  // there from here at the earliest
	acquired  int64  // or from here at the latest
	mayGo     int64  // from here on Redis may have let go of it
	gone      int64  // from here on it can't be there, even if nobody says so
	letGo     int64  // its release was sent after this
	freed     int64  // and done by then, or found that others were quicker; 0 if it is not known to be
	confirmed bool   // that it was released
	marks     bool   // the release leaves a marker
	markMay   int64  // mayGo of the marker
	markGone  int64
}

// content is what a key holds: nothing, a lock, or its marker. A lock that may have gone stays until something else comes.
type content struct {
	*life
	marker bool
}

func (s content) String() string {
	switch {
	case s.life == nil:
		return "free"
	case s.marker:
		return "marker of " + s.by
	}
	return "lock of " + s.by
}

// mayBeGone reports whether the key may be free by the stamp t.
func (s content) mayBeGone(t int64) bool {
	switch {
	case s.life == nil:
		return true
	case s.marker:
		return s.markMay <= t
	}
	return s.mayGo <= t
}

// canBeSeen reports whether an operation that began at t may find it.
func (s content) canBeSeen(t int64) bool {
	if s.marker {
		return s.markGone >= t
	}
	return s.gone >= t
}

type verbKind string

const (
	doAcquire verbKind = "acquires it"
	doRelease verbKind = "releases it"
	doMiss    verbKind = "finds its lock gone"
	doMeet    verbKind = "finds the lock of"
	doMeetEnd verbKind = "finds the marker of"
)

// operation is what a locker did to the key or saw there, at some moment from call to ret.
type operation struct {
	kind      verbKind
	by        string
	life      *life     // of doAcquire, doRelease and doMiss
	named     string    // task, of doMeet and doMeetEnd
	unspoken  []content // what may be there under that name without anybody having said so
	call, ret int64
}

func (o *operation) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s", o.by, o.kind, o.named)) + fmt.Sprintf(" (%d–%d)", o.call, o.ret)
}

// step returns what the key may hold after o, nothing if o cannot have found s there.
func step(s content, o *operation) (after []content) {
	free := s.mayBeGone(o.ret)
	switch o.kind {
	case doAcquire:
		if free {
			return []content{{life: o.life}}
		}
	case doRelease:
		// Where another came after it, it had gone. If that is gone too, the release meets nobody, and leaves its marker.
		if s == (content{life: o.life}) || free {
			if o.life.marks {
				return []content{{o.life, true}}
			}
			return []content{{}}
		}
	case doMiss:
		if s != (content{life: o.life}) {
			return []content{s}
		}
		if free {
			return []content{{}}
		}
	case doMeet, doMeetEnd:
		if s.life != nil && s.task == o.named && s.marker == (o.kind == doMeetEnd) && s.canBeSeen(o.call) {
			after = append(after, s)
		}
		if free {
			after = append(after, o.unspoken...)
		}
	}
	return after
}

// keyModel is all that was said of one key.
type keyModel struct {
	lives      []*life
	operations []*operation
}

// check checks the key piece by piece.
func (k *keyModel) check(key string, result *Linearizability) {
	k.prune()
	slices.SortFunc(k.operations, func(a, b *operation) int { return cmp.Or(cmp.Compare(a.call, b.call), cmp.Compare(a.ret, b.ret)) })
	init := []content{{}}
	var piece []porcupine.Operation
	var quiet int64 // nothing of the piece is under way after this
	for _, o := range k.operations {
		if len(piece) >= pieceSize && o.call > quiet {
			result.check(key, init, piece)
			init, piece = k.contentsAt(quiet), nil
		}
		quiet = max(quiet, o.ret)
		piece = append(piece, porcupine.Operation{ClientId: len(piece), Input: o, Call: o.call, Return: o.ret})
	}
	result.check(key, init, piece)
}

// heldBy reports whether what a process met may be a lock that it held itself.
func (k *keyModel) heldBy(process string, met *operation) bool {
	return slices.ContainsFunc(k.lives, func(l *life) bool {
		return l.process == process && l.task == met.named && l.asked <= met.ret && l.believed >= met.call
	})
}

// prune leaves out what another locker's word implies: that it met the same at some time within the same interval.
func (k *keyModel) prune() {
	slices.SortFunc(k.operations, func(a, b *operation) int { return cmp.Or(cmp.Compare(a.ret, b.ret), cmp.Compare(b.call, a.call)) })
	type meeting struct {
		kind  verbKind
		named string
	}
	latest := make(map[meeting]int64)
	k.operations = slices.DeleteFunc(k.operations, func(o *operation) bool {
		if o.kind != doMeet && o.kind != doMeetEnd {
			return false
		}
		call, known := latest[meeting{o.kind, o.named}]
		implied := known && call >= o.call
		if !implied {
			latest[meeting{o.kind, o.named}] = o.call
		}
		return implied
	})
}

// contentsAt returns what the key may hold at t, when no operation is under way: the one thing that it must, or all that it can
// if there is no such thing, or more than one, since the piece before broke the model.
func (k *keyModel) contentsAt(t int64) []content {
	var must []content
	can := []content{{}}
	for _, l := range k.lives {
		held, marker := content{life: l}, content{l, true}
		freed := l.freed != 0 && l.freed <= t
		switch {
		case l.asked <= t && t <= l.gone && !freed:
			can = append(can, held)
			if l.acquired <= t && t < l.mayGo {
				must = append(must, held)
			}
		case l.confirmed && freed && l.marks && t <= l.markGone:
			can = append(can, marker)
			if t < l.markMay {
				must = append(must, marker)
			}
		}
	}
	if len(must) == 1 {
		return must
	}
	return can
}

// check lets porcupine look for an order of the piece's operations that begins with one of init.
func (r *Linearizability) check(key string, init []content, piece []porcupine.Operation) {
	r.Pieces++
	r.Operations += len(piece)
	r.Largest = max(r.Largest, len(piece))
	model := modelFrom(init)
	switch porcupine.CheckOperationsTimeout(model, piece, pieceTime) {
	case porcupine.Unknown:
		r.Unknown++
	case porcupine.Illegal:
		_, info := porcupine.CheckOperationsVerbose(model, piece, pieceTime)
		r.Violations = append(r.Violations, Violation{BadOrder, key + ": " + explain(model, piece, info)})
		if len(r.drawings) < drawn {
			r.drawings = append(r.drawings, drawing{model, info})
		}
	}
}

func modelFrom(init []content) porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return boxed(init) },
		Step: func(state, input, _ any) []any { return boxed(step(state.(content), input.(*operation))) },
		Hash: func(state any) uint64 {
			s := state.(content)
			if s.life == nil {
				return 0
			}
			return uint64(s.acquired)<<1 ^ uint64(len(s.by))
		},
		DescribeOperation: func(input, _ any) string { return input.(*operation).String() },
		DescribeState:     func(state any) string { return state.(content).String() },
	}
	return m.ToModel()
}

func boxed(contents []content) (states []any) {
	for _, s := range contents {
		states = append(states, s)
	}
	return states
}

// explain shows where the longest order ends that could be found, and what should have come next.
func explain(model porcupine.Model, piece []porcupine.Operation, info porcupine.LinearizationInfo) string {
	var longest []porcupine.Operation
	for _, order := range info.PartialLinearizationsOperations()[0] {
		if len(order) > len(longest) {
			longest = order
		}
	}
	state := model.Init()
	placed := make(map[*operation]bool)
	var before []string
	for _, o := range longest {
		_, state = model.Step(state, o.Input, nil)
		placed[o.Input.(*operation)] = true
		before = append(before, o.Input.(*operation).String())
	}
	var left []*operation
	for _, o := range piece {
		if o := o.Input.(*operation); !placed[o] {
			left = append(left, o)
		}
	}
	slices.SortFunc(left, func(a, b *operation) int { return cmp.Compare(a.ret, b.ret) })
	const shown = 3
	var after []string
	for _, o := range left[:min(shown, len(left))] {
		after = append(after, o.String())
	}
	return fmt.Sprintf("after [%s] the key holds %s, which does not allow what comes next of [%s]",
		strings.Join(before[max(0, len(before)-shown):], "; "), model.DescribeState(state), strings.Join(after, "; "))
}

// modeler reads a history into the models of its keys.
type modeler struct {
	*checker
	keys   map[string]*keyModel
	stops  map[string][]Record // by process: the times in which it did not run
	ghosts map[string][]*ghost // by task
	tasks  map[string]bool     // all that were delivered
}

// ghost is a try of a delivery that may have taken the lock without that anybody knows.
type ghost struct {
	life
	key string // empty: unknown
}

func newModeler(history []Record, terms Terms) *modeler {
	m := &modeler{
		checker: newChecker(terms),
		keys:    make(map[string]*keyModel),
		stops:   make(map[string][]Record),
		ghosts:  make(map[string][]*ghost),
		tasks:   make(map[string]bool),
	}
	m.collect(history)
	var all []*delivery
	for _, d := range m.deliveries {
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b *delivery) int {
		return cmp.Or(cmp.Compare(a.seen, b.seen), strings.Compare(a.process, b.process), cmp.Compare(a.n, b.n))
	})
	for _, d := range all {
		if _, known := m.stops[d.process]; !known {
			m.stops[d.process] = m.stopsOf(d.process)
		}
		m.tasks[d.task] = true
		m.addGhost(d)
		m.addLocks(d)
	}
	for _, d := range all {
		m.addVerdicts(d)
	}
	return m
}

func (m *modeler) key(name string) *keyModel {
	if m.keys[name] == nil {
		m.keys[name] = &keyModel{}
	}
	return m.keys[name]
}

// stopsOf returns the times in which a process did not run for about the margin between a lock's validity and its TTL.
func (m *modeler) stopsOf(process string) []Record {
	stops := slices.Clone(m.stalls[process])
	for _, f := range m.faults {
		if f.Fault == FaultPause && processOn(f.Process, process) {
			stops = append(stops, f)
		}
	}
	return slices.DeleteFunc(stops, func(s Record) bool { return s.Until-s.T < m.ttl/20 })
}

// asked is when a delivery of a lock sent what it had the answer to at t, at the earliest. A try that takes longer than a
// quarter of the TTL is given back, and who waits tries again soon.
func (m *modeler) asked(d *delivery, t int64) int64 {
	from := max(d.seen, t-m.ttl/4-poll-m.slack)
	for _, s := range m.stops[d.process] {
		if s.T <= t && s.Until >= from {
			return d.seen
		}
	}
	return from
}

// over is when a lock that process last asked for at t has lapsed, without anybody's help: a TTL after what process sent has
// arrived. While something stands in the way, that takes until it is out of the way, and a TTL more where it only delays. What
// a process had sent when it ended is gone with it.
func (m *modeler) over(process string, t int64) int64 {
	from, arrived := t-m.ttl, t
	for _, f := range m.faults {
		if f.T <= arrived && f.Until >= from && (f.Process == "" && f.Key == "" || processOn(f.Process, process)) {
			arrived = max(arrived, f.Until)
		}
	}
	for _, s := range m.stalls[RigProcess] { // through which everything goes
		if s.T <= arrived+m.ttl/10 && s.Until >= from {
			arrived = max(arrived, s.Until)
		}
	}
	if t != m.ends[process].T && !m.reachable(process, t, t) {
		arrived += m.ttl
	}
	return m.lapsed(from, arrived+m.ttl+m.slack)
}

// lapsed is t, when a key that was there at from should lapse, unless the server's clock jumped back: then nobody knows.
func (m *modeler) lapsed(from, t int64) int64 {
	for _, f := range m.faults {
		if f.Fault == FaultBackward && f.Until >= from && f.T <= t {
			return never
		}
	}
	return t
}

// addGhost adds a delivery that may have had the lock unnoticed: its process was killed, its tries failed, took long, or something
// stood in their way.
func (m *modeler) addGhost(d *delivery) {
	last, key, doubt := m.ends[d.process].T, "", true
	switch {
	case d.passed():
		return
	case len(d.acquired) > 0:
		last, key, doubt = d.acquired[0].T, d.acquired[0].Key, false
	case len(d.outcomes) > 0:
		o := d.outcomes[0]
		last, key, doubt = o.T, o.Key, o.Holder == ""
	}
	doubt = doubt || slices.ContainsFunc(m.losses[""], func(f Record) bool { // asked the old primary first, and then the new one
		return f.Fault == FaultFailover && f.T <= last && f.Until >= d.seen
	})
	if !doubt && last-d.seen <= m.ttl/4 && m.reachable(d.process, d.seen, last) {
		return
	}
	gone := never
	if last != 0 { // the history says how its process ended
		gone = m.over(d.process, last)
	}
	m.ghosts[d.task] = append(m.ghosts[d.task], &ghost{key: key, life: life{
		by: "a try of " + d.name(), task: d.task, asked: d.seen, mayGo: always, gone: gone,
	}})
}

func (d *delivery) name() string { return fmt.Sprintf("%s of %s/%d", d.task, d.process, d.n) }

// addLocks adds the locks of a delivery and what it did with them.
func (m *modeler) addLocks(d *delivery) {
	exit := d.exit
	if exit == nil && d.inner != nil {
		exit = d.inner.exit
	}
	for i, a := range d.acquired {
		end := Record{T: m.ends[d.process].T}
		if i < len(d.ended) {
			end = d.ended[i]
		}
		l := &life{by: d.name(), process: d.process, task: d.task, asked: m.asked(d, a.T), acquired: a.T, believed: never}
		if end.T != 0 {
			l.believed = end.T
		}
		k := m.key(a.Key)
		k.lives = append(k.lives, l)
		k.operations = append(k.operations, &operation{kind: doAcquire, by: l.by, life: l, call: l.asked, ret: a.T})
		released := end.Kind == string(redislock.EventReleased)
		missed := end.Kind == string(redislock.EventLost) && !strings.Contains(end.Err, "has not confirmed it in time")
		switch {
		case exit != nil && exit.T >= a.T && !(released && end.T < exit.T):
			l.letGo, l.marks = exit.T, exit.DoneFor > 0 && exit.Err == ""
		case released: // by hand, or at once by a Locker that was closed meanwhile
			l.letGo = a.T
		}
		l.confirmed = released && end.Err == ""
		if missed || l.confirmed {
			l.freed = end.T
		}
		m.boundLock(l, d.process, a.Key, end)
		if l.marks {
			m.boundMarker(l, a.Key, exit.DoneFor)
		}
		switch {
		case l.confirmed:
			k.operations = append(k.operations, &operation{kind: doRelease, by: l.by, life: l, call: l.letGo, ret: end.T})
		case missed: // what is gone stays gone, so this holds at the end of the call as well
			k.operations = append(k.operations, &operation{kind: doMiss, by: l.by, life: l, call: end.T, ret: end.T})
		}
	}
}

// boundLock finds out from when a lock may be gone, and from when it must be. Where its holder believes in it, Redis keeps
// it for a tenth of the TTL at least.
func (m *modeler) boundLock(l *life, process, key string, end Record) {
	margin := m.ttl / 10
	l.mayGo = m.forgotten(key, l.asked)
	lapse := func(from int64) { l.mayGo = min(l.mayGo, max(from, l.asked+m.ttl)-rounding) }
	for _, s := range m.stops[process] {
		if s.Until-s.T >= margin-2*rounding && s.Until >= l.asked && (s.T <= end.T || end.T == 0) {
			lapse(s.T + margin)
		}
	}
	l.gone = never
	if l.freed == 0 {
		lapse(end.T)
		if end.T != 0 {
			l.gone = m.over(process, end.T)
		}
	}
	switch {
	case l.confirmed && end.T-l.letGo > margin:
		lapse(l.letGo + margin)
	case !l.confirmed && l.letGo != 0:
		l.mayGo = min(l.mayGo, l.letGo)
	}
}

// boundMarker does the same for the marker. That of a release which nobody has confirmed may be there, and need not.
func (m *modeler) boundMarker(l *life, key string, doneFor int64) {
	l.markMay, l.markGone = always, never
	if l.confirmed {
		l.markMay = min(m.forgotten(key, l.letGo), l.letGo+doneFor-rounding)
		l.markGone = m.lapsed(l.letGo, l.freed+doneFor+rounding)
	}
}

// forgotten is when Redis may first have forgotten what was at the key after from.
func (m *modeler) forgotten(key string, from int64) int64 {
	first := never
	for _, losses := range [][]Record{m.losses[""], m.losses[key]} {
		for _, f := range losses {
			if f.Until >= from {
				first = min(first, f.T)
			}
		}
	}
	return first
}

// addVerdicts adds what a delivery that did not run says of who was in its way.
func (m *modeler) addVerdicts(d *delivery) {
	for _, o := range d.outcomes {
		if o.Holder == "" || o.Kind == string(redislock.EventRan) || o.Kind == string(redislock.EventPassed) {
			continue
		}
		met := &operation{kind: doMeet, by: d.name(), named: o.Holder, call: m.asked(d, o.T), ret: o.T}
		k := m.key(o.Key)
		if o.Kind == string(redislock.EventDone) {
			met.kind = doMeetEnd
		} else if k.heldBy(d.process, met) {
			continue // its Locker did not ask
		}
		k.operations = append(k.operations, met)
		met.unspoken = append(m.ghostsOf(met, o.Key), m.revenants(met, o.Key)...)
	}
}

// ghostsOf returns the tries and the releases of the task that nobody has confirmed, and thieves, whose names nobody knows.
func (m *modeler) ghostsOf(met *operation, key string) (found []content) {
	if met.kind == doMeetEnd {
		for _, l := range m.key(key).lives {
			if l.task == met.named && l.marks && !l.confirmed && l.letGo <= met.ret {
				found = append(found, content{l, true})
			}
		}
		return found
	}
	for _, g := range m.ghosts[met.named] {
		if (g.key == "" || g.key == key) && g.asked <= met.ret && g.gone >= met.call {
			found = append(found, content{life: &g.life})
		}
	}
	for _, f := range m.losses[key] {
		gone := m.lapsed(f.T, f.Until+2*m.ttl+m.slack) // whatever TTL a thief sets
		if f.Fault == FaultSteal && !m.tasks[met.named] && f.T <= met.ret && gone >= met.call {
			found = append(found, content{life: &life{by: met.named, task: met.named, mayGo: always, gone: gone}})
		}
	}
	return found
}

// revenants returns the locks and markers of the task that a failover may have brought back: the new primary may not know yet
// what became of them, and while it takes over, some still ask the old one.
func (m *modeler) revenants(met *operation, key string) (found []content) {
	for _, f := range m.losses[""] {
		if f.Fault != FaultFailover || f.T > met.ret {
			continue
		}
		for _, l := range m.key(key).lives {
			if l.task != met.named || l.asked > f.Until || met.kind == doMeetEnd && !l.marks {
				continue
			}
			back := *l
			back.mayGo, back.markMay = always, always
			if l.freed != 0 {
				back.gone = m.lapsed(l.asked, l.freed+m.ttl+m.slack)
			}
			if s := (content{&back, met.kind == doMeetEnd}); s.canBeSeen(met.call) {
				found = append(found, s)
			}
		}
	}
	return found
}
