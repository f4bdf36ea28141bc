package redislock

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"example.com/redislock/internal/store"
)

// The algorithm is the single-instance lock of the Redis documentation: SET NX PX with a random token, compare-and-delete in
// Lua. Everything that is said to Redis is said here.

//go:embed script/acquire.lua
var acquireSource string

//go:embed script/extend.lua
var extendSource string

//go:embed script/release.lua
var releaseSource string

//go:embed script/done.lua
var doneSource string

var (
	acquireScript = newScript(acquireSource)
	extendScript  = newScript(extendSource)
	releaseScript = newScript(releaseSource)
	doneScript    = newScript(doneSource)
)

// script is a Lua script whose words to Redis are interfaces from the start, which saves allocations.
type script struct {
	*redis.Script
	source, hash any
}

func newScript(source string) *script {
	s := redis.NewScript(source)
	return &script{s, source, s.Hash()}
}

// call runs the script, by its hash if the server knows it. The keys come first.
func (s *script) call(ctx context.Context, rdb redis.UniversalClient, keys int, args ...any) *redis.Cmd {
	cmd := scriptCommand(ctx, "evalsha", s.hash, keys, args)
	if _ = rdb.Process(ctx, cmd); isForgotten(cmd.Err()) {
		cmd = scriptCommand(ctx, "eval", s.source, keys, args)
		_ = rdb.Process(ctx, cmd)
	}
	return cmd
}

func scriptCommand(ctx context.Context, name string, what any, keys int, args []any) *redis.Cmd {
	cmd := redis.NewCmd(ctx, append([]any{name, what, keys}, args...)...)
	cmd.SetFirstKeyPos(3)
	return cmd
}

// isForgotten reports whether the server does not know the script.
func isForgotten(err error) bool { return err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") }

// What extend, release and done answer.
const (
	replyOurs    = 1
	replyAnother = -1 // 0, from release and extend: nobody's
)

// fenceLifetime is how long a fence counter is kept after the last acquire. Redis's clock takes over from there.
const fenceLifetime = 24 * time.Hour

// redisStore keeps locks in Redis.
type redisStore struct {
	rdb              redis.UniversalClient
	claims, releases bell // of prompt calls
}

func (s *redisStore) Same(other store.Store) bool {
	o, ok := other.(*redisStore)
	return ok && s.rdb == o.rdb
}

func (*redisStore) Name() string        { return "Redis" }
func (*redisStore) Transactional() bool { return false }

// Bulk is for a plain client, since that of a cluster may ask several nodes and wait for the slowest.
func (s *redisStore) Bulk() store.Bulk {
	if _, ok := s.rdb.(*redis.Client); !ok {
		return nil
	}
	return s
}

// Prompt reports what go-redis keeps by itself: deadlines if it is told to, or else its own timeout. A claim that we cut off
// earlier than that might come after it was given back.
func (s *redisStore) Prompt(claim time.Duration) (claims, releases bool) {
	o := s.rdb.(*redis.Client).Options()
	return o.ContextTimeoutEnabled || 0 < o.ReadTimeout && o.ReadTimeout <= claim, o.ContextTimeoutEnabled
}

// Claim asks for the key. go-redis resends a command whose reply was lost, so finding our own value means that it is ours; its
// TTL has been running since the first send, hence the extension.
func (s *redisStore) Claim(ctx context.Context, r store.Request) (store.Claim, error) {
	set := setPlain
	if r.Fencing {
		set = setFenced
	}
	lease := &redisLease{redisStore: s, key: r.Key, value: r.Value, ttl: r.TTL}
	if r.Prompt {
		ctx = &until{Context: ctx, deadline: r.Until, rung: s.claims.at(r.Until)}
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, r.Until)
		defer cancel()
	}
	c := store.Claim{Lease: lease, Sent: time.Now()}
	present, fence, err := set(ctx, lease)
	switch {
	case errors.Is(err, redis.Nil):
		c.Fence = fence
		return c, nil
	case err != nil:
		if err = redisError("acquire lock", r.Key, err); !errors.Is(err, ErrUnavailable) {
			c.Lease = nil // it was refused
		}
		return c, err
	case present == r.Value:
		c.Sent = time.Now()
		if err := lease.Extend(ctx); err != nil {
			return c, fmt.Errorf("%w: acquire lock %s: its reply was lost, and then: %w", ErrUnavailable, r.Key, err)
		}
		return c, nil
	}
	return store.Claim{}, &store.Taken{Value: present}
}

// setPlain sets the key to the value unless something is there, which it returns; redis.Nil says that it did.
func setPlain(ctx context.Context, l *redisLease) (present string, _ int64, err error) {
	set := redis.NewStatusCmd(ctx, "set", l.key, l.value, "nx", "get", "px", l.ttl.Milliseconds())
	_ = l.rdb.Process(ctx, set)
	present, err = set.Result()
	return present, 0, err
}

// setFenced is setPlain with a fencing number, by a script that extends what it finds to be ours itself.
func setFenced(ctx context.Context, l *redisLease) (present string, fence int64, err error) {
	counter := l.key.(string) + ":fence"
	reply, err := acquireScript.call(ctx, l.rdb, 2, l.key, counter, l.value, l.ttl.Milliseconds(), fenceLifetime.Milliseconds()).Slice()
	if err != nil {
		return "", 0, err
	}
	present, _ = reply[0].(string)
	if present != l.value {
		return present, 0, nil
	}
	number, _ := reply[1].(string)
	if fence, err = strconv.ParseInt(number, 10, 64); err != nil {
		return "", 0, err
	}
	return "", fence, redis.Nil
}

// ExtendAll pipelines the extensions. Where the server has forgotten the script, it learns it from the first of those that need it.
func (s *redisStore) ExtendAll(leases []store.Lease, deadline time.Time) []error {
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	errs := s.pipeline(ctx, leases)
	if i := slices.IndexFunc(errs, isForgotten); i >= 0 {
		errs[i] = leases[i].Extend(ctx)
		copy(errs[i+1:], s.pipeline(ctx, leases[i+1:]))
	}
	return errs
}

func (s *redisStore) pipeline(ctx context.Context, leases []store.Lease) []error {
	pipe := s.rdb.Pipeline()
	replies, errs := make([]*redis.Cmd, len(leases)), make([]error, len(leases))
	for i, lease := range leases {
		r := lease.(*redisLease)
		replies[i] = scriptCommand(ctx, "evalsha", extendScript.hash, 1, []any{r.key, r.value, r.ttl.Milliseconds()})
		_ = pipe.Process(ctx, replies[i])
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	for i, reply := range replies {
		errs[i] = extension(reply)
	}
	return errs
}

// Read gets what is at the key.
func (s *redisStore) Read(ctx context.Context, key string) (value string, ok bool, err error) {
	value, err = s.rdb.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", false, nil
	}
	if err != nil {
		return "", false, redisError("read lock", key, err)
	}
	return value, true, nil
}

// Free deletes the key.
func (s *redisStore) Free(ctx context.Context, key string) error {
	if err := s.rdb.Del(ctx, key).Err(); err != nil {
		return redisError("force release of lock", key, err)
	}
	return nil
}

// redisLease is a key with our value: strings, as interfaces since each command would allocate them.
type redisLease struct {
	*redisStore
	key, value any
	ttl        time.Duration
}

// Bind has nothing to add to the context.
func (r *redisLease) Bind(ctx context.Context, _ store.Owner) context.Context { return ctx }

// Extend sets the TTL anew if the key is still ours.
func (r *redisLease) Extend(ctx context.Context) error {
	return extension(extendScript.call(ctx, r.rdb, 1, r.key, r.value, r.ttl.Milliseconds()))
}

// extension reads the reply to the script.
func extension(cmd *redis.Cmd) error {
	reply, err := cmd.Int()
	if err == nil && reply != replyOurs || isWrongType(err) {
		return store.Gone("the key is gone or somebody else's")
	}
	return err
}

// Release deletes the key or replaces it by the done marker, and tries again while the key can still be ours.
func (r *redisLease) Release(ctx context.Context, end store.End) (work, err error) {
	script, args := releaseScript, []any{r.key, r.value}
	if end.Prompt {
		ctx = &until{ctx, end.Until, r.releases.at(end.Until), true}
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(context.WithoutCancel(ctx), end.Until)
		defer cancel()
	}
	if end.Succeeded && end.Marker != "" {
		script, args = doneScript, append(args, end.Marker, end.DoneFor.Milliseconds())
	}
	for {
		reply, err := script.call(ctx, r.rdb, 1, args...).Int()
		switch {
		case err == nil && reply == replyAnother, isWrongType(err):
			// Or freed by a try whose reply was lost, and taken since; a loss is the safer guess.
			return nil, store.Gone("somebody else's at its release")
		case err == nil: // also gone: an earlier try freed it and its reply was lost
			return nil, nil
		}
		err = redisError("release lock", r.key.(string), err)
		if end.Prompt || !errors.Is(err, ErrUnavailable) || errors.Is(err, redis.ErrClosed) || !sleep(ctx, retryInterval(r.ttl)) {
			return nil, err
		}
	}
}

// GiveBack deletes the key if it is ours. If it fails, the key lapses within one TTL.
func (r *redisLease) GiveBack(ctx context.Context) {
	_ = releaseScript.call(ctx, r.rdb, 1, r.key, r.value).Err()
}

// until is the context of a prompt call. Unless detached, it has an error once its parent has ended, but nobody is told.
type until struct {
	context.Context
	deadline time.Time
	rung     <-chan struct{} // closed by then
	detached bool
}

func (u *until) Deadline() (time.Time, bool) { return u.deadline, true }
func (u *until) Done() <-chan struct{}       { return u.rung }

func (u *until) Err() error {
	if err := u.Context.Err(); err != nil && !u.detached {
		return err
	}
	select {
	case <-u.rung:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// bell rings for calls of one kind, whose deadlines are as far away for each. One timer serves all that are made within a tenth of
// that, and is left to fire, since to set and stop one for each call is a good part of what a lock costs.
type bell struct{ next atomic.Pointer[peal] }

type peal struct {
	at   time.Time
	rung chan struct{}
}

// at returns what is closed at a deadline, or up to a tenth of the time until then earlier.
func (b *bell) at(deadline time.Time) <-chan struct{} {
	p, left := b.next.Load(), time.Until(deadline)
	if p == nil || deadline.Sub(p.at).Abs() > left/10 {
		p = &peal{deadline, make(chan struct{})}
		time.AfterFunc(left, func() { close(p.rung) })
		b.next.Store(p)
	}
	return p.rung
}

// outages are the replies of a Redis that is there but can't serve the command now.
var outages = []string{
	"LOADING ", "BUSY ", "READONLY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ", "NOREPLICAS ", "OOM ", "MISCONF ",
	"max number of clients", // HasErrorPrefix drops the ERR before it
}

// redisError wraps an error of go-redis: as ErrUnavailable when Redis could not be reached or can't serve now, plainly when
// it refused, since trying again would not help.
func redisError(verb, key string, err error) error {
	var reply redis.Error
	unavailable := !errors.As(err, &reply)
	for _, prefix := range outages {
		unavailable = unavailable || redis.HasErrorPrefix(err, prefix)
	}
	if unavailable {
		return fmt.Errorf("%w: %s %s: %w", ErrUnavailable, verb, key, err)
	}
	return fmt.Errorf("redislock: %s %s: %w", verb, key, err)
}

// isWrongType reports whether something other than a string is at the key. Scripts wrap the reply, so its place varies.
func isWrongType(err error) bool {
	if err == nil {
		return false
	}
	var reply redis.Error
	return errors.As(err, &reply) && strings.Contains(err.Error(), "WRONGTYPE")
}
