package redislock

import (
	"errors"
	"fmt"
	"time"
)

// Errors to match with errors.Is. Each says one thing: a lock that is taken, work that is done and a Redis that cannot be
// reached never look alike.
var (
	// ErrHeld matches a *HeldError for a lock that somebody else is holding.
	ErrHeld = errors.New("redislock: lock is held")
	// ErrDone matches a *HeldError for a done marker: the work was done within the time that WithDoneFor sets.
	ErrDone = errors.New("redislock: work is done")
	// ErrLost is in the cause of a context whose lock is lost: another process may be running the same work by now.
	ErrLost = errors.New("redislock: lock is lost")
	// ErrUnavailable says that Redis, or the database of a row lock, could not be asked, or not in time: nothing is known about
	// the lock.
	ErrUnavailable = errors.New("redislock: lock store is unavailable")
	// ErrInvalidKey says that no lock name can be made from a task, or that a name is empty.
	ErrInvalidKey = errors.New("redislock: invalid key")
	// ErrClosed says that the Locker has been shut down.
	ErrClosed = errors.New("redislock: locker is shut down")
)

// HeldError says who has the lock, or whose done marker is at its key. It matches ErrHeld, or ErrDone when Holder.Done.
type HeldError struct {
	// Key is the key of the lock, in Redis or in the table of the row locks.
	Key string
	// Holder is what the holder wrote there. It is the zero Holder when a version of this package that we can't read
	// wrote it, or when it can't be told who has a row locked.
	Holder Holder
	// RetryIn is how long the task is put back for where a policy does so, jitter included. Zero from Do and TryAcquire.
	RetryIn time.Duration
}

// Error names the key and the holder.
func (e *HeldError) Error() string {
	text := fmt.Sprintf("redislock: acquire lock %s: held by %s", e.Key, e.Holder)
	if e.Holder.Done {
		text = fmt.Sprintf("redislock: acquire lock %s: work done by %s", e.Key, e.Holder)
	}
	if e.RetryIn > 0 {
		text += fmt.Sprintf("; retry in %s", e.RetryIn.Round(time.Millisecond))
	}
	return text
}

// Is reports whether target is ErrHeld, or ErrDone when the holder has left a done marker.
func (e *HeldError) Is(target error) bool {
	if e.Holder.Done {
		return target == ErrDone
	}
	return target == ErrHeld
}
