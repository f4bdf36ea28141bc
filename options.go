package redislock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Option changes how a Locker works. Later options win; only observers add up. An option that cannot be used makes New
// fail with an error that names it and says what it takes.
type Option interface{ apply(*config) error }

type optionFunc func(*config) error

func (f optionFunc) apply(c *config) error { return f(c) }

// config is what the options set. It does not change after New.
type config struct {
	key       KeyFunc
	types     []string // nil: all
	prefix    string
	ttl       time.Duration
	doneFor   time.Duration
	grace     time.Duration
	policy    Policy
	fencing   bool
	failOpen  bool
	observers []func(context.Context, Event)
	logger    *slog.Logger // nil: slog.Default
}

const (
	defaultPrefix = "redislock:"
	defaultTTL    = 30 * time.Second
	defaultGrace  = 5 * time.Minute
	minTTL        = time.Second
	maxPrefix     = 100
)

func newConfig(opts []Option) (config, error) {
	c := config{prefix: defaultPrefix, ttl: defaultTTL, grace: defaultGrace}
	if err := Options(opts...).apply(&c); err != nil {
		return config{}, err
	}
	if c.policy.kind == policyDefault {
		c.policy = Skip()
		if c.key != nil || c.doneFor > 0 {
			c.policy = Retry(0) // a copy may be other work, or has to stand by until the marker decides
		}
	}
	if c.key == nil {
		c.key = ByTypeAndPayload
	}
	return c, nil
}

// Options bundles options into one, so that several Lockers can share them.
func Options(opts ...Option) Option {
	return optionFunc(func(c *config) error {
		for i, opt := range opts {
			if opt == nil {
				return fmt.Errorf("redislock: configure: option %d is nil", i+1)
			}
			if err := opt.apply(c); err != nil {
				return err
			}
		}
		return nil
	})
}

// WithKey sets what makes two tasks the same work. Default: ByTypeAndPayload, with Skip as the policy; any KeyFunc given
// here makes Retry(0) the default policy, since two tasks of one key may then be different work. Not nil.
func WithKey(key KeyFunc) Option {
	return optionFunc(func(c *config) error {
		if key == nil {
			return errors.New("redislock: configure WithKey: the KeyFunc is nil")
		}
		c.key = key
		return nil
	})
}

// WithTypes limits the middleware to task types that match one of the patterns, exactly or as a prefix, as asynq.ServeMux
// matches. Tasks of other types pass through untouched, without an event. Default: all types. At least one pattern, none
// of them blank.
func WithTypes(patterns ...string) Option {
	patterns = append([]string{}, patterns...)
	return optionFunc(func(c *config) error {
		if len(patterns) == 0 {
			return errors.New("redislock: configure WithTypes: want at least one pattern")
		}
		for _, p := range patterns {
			if strings.TrimSpace(p) == "" {
				return fmt.Errorf("redislock: configure WithTypes: pattern %q is blank", p)
			}
		}
		c.types = patterns
		return nil
	})
}

// WithKeyPrefix sets what every key begins with. Default: "redislock:". 1 to 100 bytes of valid UTF-8 without braces and
// control characters.
func WithKeyPrefix(prefix string) Option {
	return optionFunc(func(c *config) error {
		if prefix == "" || len(prefix) > maxPrefix || !utf8.ValidString(prefix) ||
			strings.ContainsAny(prefix, "{}") || strings.ContainsFunc(prefix, unicode.IsControl) {
			return fmt.Errorf("redislock: configure WithKeyPrefix: %q: want 1 to %d bytes of UTF-8 without braces and control characters",
				prefix, maxPrefix)
		}
		c.prefix = prefix
		return nil
	})
}

// WithTTL sets how long a lock outlives a holder that can no longer extend it. A living holder extends it every TTL/3.
// Default: 30 s. At least 1 s; fractions of a millisecond are dropped.
func WithTTL(ttl time.Duration) Option {
	return optionFunc(func(c *config) error {
		if ttl < minTTL {
			return fmt.Errorf("redislock: configure WithTTL: %v: want at least %v", ttl, minTTL)
		}
		c.ttl = ttl.Truncate(time.Millisecond)
		return nil
	})
}

// WithPolicy sets what happens to a task whose lock another task holds. Default, also of the zero Policy: Skip, or
// Retry(0) with WithKey or WithDoneFor.
func WithPolicy(p Policy) Option {
	return optionFunc(func(c *config) error {
		if err := p.check(); err != nil {
			return err
		}
		c.policy = p
		return nil
	})
}

// WithDoneFor leaves a marker for d after a successful run, and tasks that find it are dropped as done, whatever the
// policy. This is what makes work run once that many hosts enqueue: a lock alone is gone before the last copy arrives. A
// successful run is one that returns nil, so a handler that stops because its context ended must return an error.
// Choose d well under the period of the work. A run that another lock further down the chain has dropped is none.
// Default: 0, no marker. Otherwise at least 1 ms.
func WithDoneFor(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d != 0 && d < time.Millisecond {
			return fmt.Errorf("redislock: configure WithDoneFor: %v: want 0 for no marker, or at least 1ms", d)
		}
		c.doneFor = d.Truncate(time.Millisecond)
		return nil
	})
}

// WithFencing gives each lock a number that is higher than that of every earlier lock of its key, for Lock.Fence: what a handler
// writes to can then refuse a holder that was paused and is no longer the one. The number comes with the acquire, in the same
// round trip: the last one plus 1, or Redis's time in microseconds if that is more, so that it grows on where Redis has lost
// the counter, unless its clock is behind the last number as well. The counter is a second key beside the lock, kept for a day after
// the last acquire. A handler that WithFailOpen runs without a lock has none. Default: off.
func WithFencing() Option {
	return optionFunc(func(c *config) error {
		c.fencing = true
		return nil
	})
}

// WithFailOpen runs handlers without a lock while Redis is unavailable (ErrUnavailable, nothing else), and the event says
// so; never after Shutdown. Default: fail closed, the task is put back. Do and TryAcquire are not affected: they return the error.
func WithFailOpen() Option {
	return optionFunc(func(c *config) error {
		c.failOpen = true
		return nil
	})
}

// WithGracePeriod sets how long a lock is kept for a handler that goes on after its context has ended. Then the lock is
// abandoned: no longer extended, its key lapses. Default: 5 min. 0 abandons at once; not negative.
func WithGracePeriod(d time.Duration) Option {
	return optionFunc(func(c *config) error {
		if d < 0 {
			return fmt.Errorf("redislock: configure WithGracePeriod: %v: want 0 or more", d)
		}
		c.grace = d
		return nil
	})
}

// WithObserver calls observe once for each Event, from the goroutine where it happens, so it must be quick and safe for
// concurrent use, and must not call Shutdown or the lock's Release. A panic in it is logged and contained. Several observers are called in the order given. Not nil.
func WithObserver(observe func(context.Context, Event)) Option {
	return optionFunc(func(c *config) error {
		if observe == nil {
			return errors.New("redislock: configure WithObserver: the function is nil")
		}
		c.observers = append(c.observers, observe)
		return nil
	})
}

// WithLogger sets where a line is written for each event: what went wrong as a warning or an error, why a task did not run
// as info, the rest at debug level. Default: slog.Default. Not nil; slog.New(slog.DiscardHandler) is silent.
func WithLogger(logger *slog.Logger) Option {
	return optionFunc(func(c *config) error {
		if logger == nil {
			return errors.New("redislock: configure WithLogger: the logger is nil; slog.New(slog.DiscardHandler) is silent")
		}
		c.logger = logger
		return nil
	})
}

// handles reports whether tasks of this type take a lock.
func (c *config) handles(taskType string) bool {
	for _, pattern := range c.types {
		if strings.HasPrefix(taskType, pattern) {
			return true
		}
	}
	return c.types == nil
}
