package mutants

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"example.com/redislock/faults/history"
)

// mutant is the product with a mistake in it.
type mutant struct {
	name  string   // the mistake
	found []string // the kinds of violations that are a find
	class string   // of the rig's faults, where the rig finds it within seconds
	real  bool     // it takes a real network: the rig only
	edits []edit
}

// edit replaces old, which the file must have once.
type edit struct{ file, old, new string }

var mutants = []mutant{
	{name: "release without the token", found: []string{history.BadOrder, history.BadOverlap, history.BadModel}, class: "key-deleted", edits: []edit{
		{"script/release.lua", "if value == ARGV[1] then", "if value then"},
	}},
	{name: "extend creates the key anew", found: []string{history.BadOrder, history.BadNotice, history.BadModel}, class: "key-deleted", edits: []edit{
		{"script/extend.lua", "if redis.call('get', KEYS[1]) == ARGV[1] then",
			"local value = redis.call('get', KEYS[1])\nif not value or value == ARGV[1] then\n  redis.call('set', KEYS[1], ARGV[1])"},
	}},
	{name: "extend without the token", found: []string{history.BadNotice, history.BadModel}, edits: []edit{
		{"script/extend.lua", "if redis.call('get', KEYS[1]) == ARGV[1] then", "if redis.call('get', KEYS[1]) then"},
	}},
	{name: "done without the token", found: []string{history.BadLoss, history.BadModel}, edits: []edit{
		{"script/done.lua", "if not value or value == ARGV[1] then", "if true then"},
	}},
	{name: "SET NX that does not know its own value", found: []string{history.BadSkip}, class: "swallow-acquire", real: true, edits: []edit{
		{"redis.go", "case present == r.Value:", "case false:"},
	}},
	{name: "acquire that outlives the task's context", found: []string{history.BadStart}, edits: []edit{
		{"lock.go", "\tcase <-ctx.Done():\n\tcase <-timer.C:", "\tcase <-timer.C:"},
		{"lock.go", "late := ctx.Err() != nil || overrun >= 0", "late := overrun >= 0"},
	}},
	{name: "own task judged by the policy", found: []string{history.BadSkip, history.BadArchive}, edits: []edit{
		{"policy.go", "if held.Holder == (Holder{}) || held.Holder.sameTask(self) {", "if held.Holder == (Holder{}) {"},
	}},
	{name: "own task skipped", found: []string{history.BadSkip}, edits: []edit{
		{"policy.go", "if held.Holder == (Holder{}) || held.Holder.sameTask(self) {",
			"if held.Holder.sameTask(self) {\n\t\t\treturn verdict{kind: EventSkipped, holder: held.Holder}\n\t\t}\n\t\tif held.Holder == (Holder{}) {"},
	}},
	{name: "marker judged by the policy", found: []string{history.BadMarker, history.BadTwice}, edits: []edit{
		{"policy.go", "case errors.Is(err, ErrDone):", "case false:"},
	}},
	{name: "no wait on the last attempt", found: []string{history.BadArchive}, edits: []edit{
		{"policy.go", "last, left := lastAttempt(s.ctx), s.left(v.wait)", "last, left := lastAttempt(s.ctx), s.left(v.wait)\n\tif last {\n\t\treturn false\n\t}"},
	}},
	{name: "marker after a failure", found: []string{history.BadMarker}, edits: []edit{
		{"lock.go", "released := k.releaseBy(until, succeeded)", "released := k.releaseBy(until, returned)"},
	}},
	{name: "marker after a panic", found: []string{history.BadMarker}, edits: []edit{
		{"lock.go", "succeeded := returned && err == nil", "succeeded := (returned || err == nil) && err == nil"},
	}},
	{name: "validity from the reply to acquire", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"redis.go", "c.Fence = fence\n", "c.Sent, c.Fence = time.Now(), fence\n"},
	}},
	{name: "validity from the reply to extend", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"lock.go", "return k.renew(sent)", "return k.renew(sent.Add(time.Since(sent)))"},
	}},
	{name: "validity to the last moment", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"lock.go", "return sent.Add(l.ttl - l.ttl/10)", "return sent.Add(l.ttl)"},
	}},
	{name: "no local deadline", found: []string{history.BadOrder, history.BadNotice, history.BadOverlap}, class: "half-open", edits: []edit{
		{"lock.go", "return sent.Add(l.ttl - l.ttl/10)", "return sent.Add(100 * l.ttl)"},
	}},
	{name: "no alarm at the end of validity", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"watchdog.go", "if k.validUntil.Before(next) {", "if false {"},
	}},
	{name: "end of validity slept through", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"watchdog.go", "return wakeToEnd", "return wakeNoMore"},
	}},
	{name: "no alarm while an extension is under way", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"watchdog.go", "k.watchdog.doubt = true\n\tk.setNext(now.Add(k.locker.ttl / 3))", "k.watchdog.doubt = true"},
	}},
	{name: "no alarm after a failed extension", found: []string{history.BadNotice, history.BadLoss}, edits: []edit{
		{"watchdog.go", "k.setNext(time.Now().Add(retryInterval(k.locker.ttl)))", "k.locker.alarms.remove(k)"},
	}},
	{name: "the alarm goes off once", found: []string{history.BadNotice, history.BadLoss}, edits: []edit{
		{"alarm.go", "a.armed = time.Time{}\n\tfor len(a.locks) > 0", "for len(a.locks) > 0"},
	}},
	{name: "the end of a lock takes another's alarm away", found: []string{history.BadNotice, history.BadLoss}, edits: []edit{
		{"alarm.go", "heap.Remove(&a.locks, place-1)", "heap.Remove(&a.locks, 0)"},
	}},
	{name: "the last alarm comes first", found: []string{history.BadNotice, history.BadLoss}, edits: []edit{
		{"alarm.go", "return h[i].watchdog.alarm.at.Before(h[j].watchdog.alarm.at)", "return h[j].watchdog.alarm.at.Before(h[i].watchdog.alarm.at)"},
	}},
	{name: "a failed extension is believed", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"lock.go", "if err == nil {\n\t\treturn k.renew(sent)", "if _, gone := isGone(err); !gone {\n\t\treturn k.renew(sent)"},
	}},
	{name: "a refused extension is believed", found: []string{history.BadNotice, history.BadOverlap}, edits: []edit{
		{"redis.go", "err == nil && reply != replyOurs || isWrongType(err)", "err == nil && reply < replyAnother || isWrongType(err)"},
	}},
	{name: "no extension", found: []string{history.BadLoss}, edits: []edit{
		{"watchdog.go", "if k.extend(ctx) != nil {", "if ctx.Err() != nil {"},
	}},
	{name: "extends with the task's context", found: []string{history.BadLoss}, edits: []edit{
		{"watchdog.go", "context.WithTimeout(context.WithoutCancel(k.ctx), k.locker.ttl)", "context.WithTimeout(k.ctx, k.locker.ttl)"},
	}},
	{name: "releases when the task's context ends", found: []string{history.BadOverlap}, edits: []edit{
		{"watchdog.go", "func() { k.outlive(context.Cause(parent)) })", "func() { k.release(false) })"},
	}},
	{name: "no grace period", found: []string{history.BadGrace}, edits: []edit{
		{"watchdog.go", "k.locker.after(k.locker.grace, func() {", "k.locker.after(0, func() {"},
	}},
	{name: "grace without end", found: []string{history.BadGrace}, edits: []edit{
		{"watchdog.go", "k.locker.after(k.locker.grace, func() {", "k.locker.after(1000*k.locker.ttl, func() {"},
	}},
	{name: "key freed before the handler runs", found: []string{history.BadOverlap, history.BadLoss}, edits: []edit{
		{"lock.go", "err = fn(k.ctx)", "_, _ = k.claim.Release(k.ctx, store.End{Held: true, Until: time.Now().Add(k.locker.ttl)})\n\terr = fn(k.ctx)"},
	}},
	{name: "no release after a panic", found: []string{history.BadGrace}, edits: []edit{
		{"lock.go", "lost := k.isLost()", "if !returned {\n\t\t\treturn\n\t\t}\n\t\tlost := k.isLost()"},
	}},
	{name: "releases with the handler's context", found: []string{history.BadLoss}, edits: []edit{
		{"redis.go", "context.WithDeadline(context.WithoutCancel(ctx), end.Until)", "context.WithDeadline(ctx, end.Until)"},
	}},
	{name: "a failed release hides success", found: []string{history.BadBooks}, edits: []edit{
		{"lock.go", "k.locker.await(released, until)\n",
			"k.locker.await(released, until)\n\t\t\tselect {\n\t\t\tcase <-released:\n\t\t\t\tif err == nil {\n\t\t\t\t\terr = k.err\n\t\t\t\t}\n\t\t\tdefault:\n\t\t\t}\n"},
	}},
	{name: "a prompt release that failed is believed", found: []string{history.BadModel}, edits: []edit{
		{"lock.go", "work, err := k.claim.Release(k.ctx, end)\n\tk.locker.checkPrompt(time.Since(until))", "work, _ := k.claim.Release(k.ctx, end)\n\tvar err error"},
	}},
	{name: "a loss hides success", found: []string{history.BadBooks}, edits: []edit{
		{"lock.go", "if err != nil && lost != nil && !errors.Is(err, ErrLost) {", "if lost != nil && !errors.Is(err, ErrLost) {"},
		{"lock.go", "err = &lostError{err, lost}", "err = lost"},
	}},
	{name: "unreachable Redis counts", found: []string{history.BadBooks}, edits: []edit{
		{"policy.go", "case errors.Is(err, ErrUnavailable):\n\t\treturn verdict{kind: EventRequeued,", "case false:\n\t\treturn verdict{kind: EventRequeued,"},
	}},
	{name: "unreachable Redis drops the task", found: []string{history.BadSkip, history.BadTask}, edits: []edit{
		{"policy.go", "case errors.Is(err, ErrUnavailable):\n\t\treturn verdict{", "case errors.Is(err, ErrUnavailable):\n\t\treturn verdict{kind: EventSkipped}\n\tcase false:\n\t\treturn verdict{"},
	}},
	{name: "lock without a TTL", found: []string{history.BadTTL}, edits: []edit{
		{"redis.go", `"nx", "get", "px", l.ttl.Milliseconds())`, `"nx", "get")`},
	}},
	{name: "contention counts", found: []string{history.BadBooks}, edits: []edit{
		{"asynq.go", "return contentionIn(err) == nil && isFailure(err)", "return isFailure(err)"},
	}},
	{name: "Shutdown frees the keys of running handlers", found: []string{history.BadOverlap}, edits: []edit{
		{"lock.go", "func (k *Lock) giveUp(cause error) {\n", "func (k *Lock) giveUp(cause error) {\n\tdefer k.claim.Release(k.ctx, store.End{Held: true, Until: time.Now().Add(k.locker.ttl)})\n"},
	}},
	{name: "no outcome after a panic", found: []string{history.BadBooks}, edits: []edit{
		{"middleware.go", "defer func() {\n\t\tl.emit(ctx, &e)", "defer func() {\n\t\tif e.Err != errUnfinished {\n\t\t\tl.emit(ctx, &e)\n\t\t}"},
	}},
	{name: "middleware twice is a stranger", found: []string{history.BadSkip}, edits: []edit{
		{"chain.go", "if k.key != key || !k.locker.store.Same(l.store) || k.isReleased() {", "if true {"},
	}},
	{name: "a Locker believes in locks that it has released", found: []string{history.BadMarker, history.BadStuck}, edits: []edit{
		{"locker.go", "if l.latest[k.key] == k {\n\t\tdelete(l.latest, k.key)\n\t}\n\tl.ring", "l.ring"},
		{"locker.go", "if k == nil || !k.isValid() {", "if k == nil {"},
	}},
	{name: "the same fencing number again", found: []string{history.BadFence}, edits: []edit{
		{"script/acquire.lua", "  fence = now\n", "  fence = '1'\n"},
	}},
}

// TestSimulation plays each mutant until it is found. Worlds that find it in the product as it is would say nothing: the first of
// them are played here, and all in the tests of the simulation.
func TestSimulation(t *testing.T) {
	args := func(worlds int) []string {
		return []string{"-test.v", "-test.run=TestWorlds", "-test.parallel=1", "-sim.seed=1", fmt.Sprint("-sim.worlds=", worlds)}
	}
	control, most := 6, 40
	if testing.Short() {
		control = 3
	}
	play := func(name string, edits []edit, play func(t *testing.T, program string)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			play(t, build(t, edits, "test", "-c", "example.com/redislock/faults/sim"))
		})
	}
	play("no mistake", nil, func(t *testing.T, program string) { pass(t, program, args(control)...) })
	for _, m := range mutants {
		if !m.real && (!testing.Short() || m.class != "") {
			play(m.name, m.edits, func(t *testing.T, program string) { find(t, m.found, program, args(most)...) })
		}
	}
}

// TestRig runs some of the mutants as real processes.
func TestRig(t *testing.T) {
	if testing.Short() {
		t.Skip("not with -short: a minute of real processes, which CI gives it in a step of its own")
	}
	if _, err := exec.LookPath("redis-server"); err != nil {
		if os.Getenv("REDISLOCK_REQUIRE_SERVERS") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	run := func(t *testing.T, edits []edit, classes ...string) (program string, args []string) {
		return build(t, edits, "build", "example.com/redislock/faults"), []string{"-dir", t.TempDir(), "-faults", strings.Join(classes, ","),
			"-seed", "1", "-duration", "8s", "-drain", "1s", "-workers", "4", "-keys", "16", "-rate", "200"}
	}
	var classes []string
	for _, m := range mutants {
		if m.class != "" && !slices.Contains(classes, m.class) {
			classes = append(classes, m.class)
		}
	}
	t.Run("no mistake", func(t *testing.T) { // beside no builds of others
		program, args := run(t, nil, classes...)
		pass(t, program, args...)
	})
	for _, m := range mutants {
		if m.class == "" {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			t.Parallel() // they wait most of the time
			program, args := run(t, m.edits, m.class)
			find(t, m.found, program, args...)
		})
	}
}
