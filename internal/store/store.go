// Package store is the seam between a Locker, which knows when a lock is taken, extended and given back, and the place where
// locks are kept: Redis, or a database for those who want the lock where the data is.
package store

import (
	"context"
	"time"
)

// Store keeps locks. It is safe for concurrent use.
type Store interface {
	// Same reports whether the other store is the same place.
	Same(other Store) bool
	// Name is what people call it.
	Name() string
	// Transactional says that what the work writes takes effect with the release of its lock, or not at all.
	Transactional() bool
	// Bulk returns the store with calls for many leases, nil where that can't be.
	Bulk() Bulk
	// Claim tries once to claim a lock. It fails with *Taken where somebody else has it. A Claim with a Lease that comes with
	// another error may have succeeded, and is to be given back.
	Claim(ctx context.Context, r Request) (Claim, error)
	// Read returns the value that is at a key, of its holder or of a done marker.
	Read(ctx context.Context, key string) (value string, ok bool, err error)
	// Free frees a key, whoever has it.
	Free(ctx context.Context, key string) error
}

// Bulk is a Store with calls for many leases.
type Bulk interface {
	Store
	// Prompt reports which calls end about as soon as they are to, claims within the time given, so that they need no goroutine of
	// their own.
	Prompt(claim time.Duration) (claims, releases bool)
	// ExtendAll extends leases of this store in one round trip. Its errors are those of Extend.
	ExtendAll(leases []Lease, until time.Time) []error
}

// Request asks for a lock.
type Request struct {
	Key     string
	Value   string // to be read by others while the lock is held; unique
	TTL     time.Duration
	Fencing bool
	Until   time.Time // when to give up
	Prompt  bool      // the caller relies on the call to return about then, and its context may end unnoticed
}

// Claim is a lock that was claimed.
type Claim struct {
	Lease
	Sent  time.Time // it is valid from then on: before the request was sent
	Fence int64     // 0 without Request.Fencing
}

// Lease is a claim's other side.
type Lease interface {
	// Bind tells whose the lease is, before it is used. It returns the context for the work.
	Bind(ctx context.Context, owner Owner) context.Context
	// Extend confirms the lease for another TTL. It fails with Gone where it has ended; any other error leaves it in doubt.
	Extend(ctx context.Context) error
	// Release ends the lease. work is why work that succeeded did not take effect, in a transactional store; err is Gone where
	// somebody else has the lock by now.
	Release(ctx context.Context, end End) (work, err error)
	// GiveBack ends a lease that was never bound, and which may not even exist.
	GiveBack(ctx context.Context)
}

// Owner is the lock that has the lease.
type Owner interface {
	// Lose says that the lease has ended, where that was noticed by itself.
	Lose(why Gone)
	// Ended returns why the lock has ended, nil while it has not.
	Ended() error
}

// End says how the work under a lease came out.
type End struct {
	Succeeded bool
	Held      bool          // the lock was held to the end
	Until     time.Time     // when to give up, whatever the context says
	Prompt    bool          // the caller relies on the call to return by then
	Marker    string        // the value of the done marker, or empty for none
	DoneFor   time.Duration // how long the marker counts
}

// Gone is the error of a lease that has ended, and says how that was seen.
type Gone string

func (g Gone) Error() string { return string(g) }

// Taken is the error of a Claim that found the key taken.
type Taken struct {
	Value   string
	Unknown bool // it can't be told by whom
}

func (t *Taken) Error() string { return "taken: " + t.Value }
