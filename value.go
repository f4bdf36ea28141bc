package redislock

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Holder is what a lock's value in Redis says of the one who wrote it. It is for people and for telling a task from its
// copies; the lock itself compares the whole value.
type Holder struct {
	// TaskID, TaskType and Queue name the asynq task. Do and TryAcquire outside a handler leave them empty.
	TaskID   string `json:"task_id,omitempty"`
	TaskType string `json:"task_type,omitempty"`
	Queue    string `json:"queue,omitempty"`
	// Host and PID name the process.
	Host string `json:"host"`
	PID  int    `json:"pid"`
	// Since is when the lock was asked for, or the work done, by the holder's own clock: to be read, not compared.
	Since time.Time `json:"since"`
	// Done says that this is no running holder but the marker that WithDoneFor leaves behind.
	Done bool `json:"done,omitempty"`
}

// String describes the holder in a log line's words.
func (h Holder) String() string {
	if h == (Holder{}) {
		return "a holder this version cannot read"
	}
	who := "no task"
	switch {
	case h.TaskID != "":
		who = fmt.Sprintf("task %s (%s, queue %q)", h.TaskID, h.TaskType, h.Queue)
	case h.TaskType != "":
		who = fmt.Sprintf("a task of type %s", h.TaskType)
	}
	return fmt.Sprintf("%s on %s pid %d since %s", who, h.Host, h.PID, h.Since.UTC().Format(time.RFC3339))
}

// sameTask reports whether both are runs of one asynq task. A task ID is unique within its queue.
func (h Holder) sameTask(other Holder) bool {
	return h.TaskID != "" && h.TaskID == other.TaskID && h.Queue == other.Queue
}

const (
	valueFamily  = "redislock/"
	valueVersion = valueFamily + "1 "
)

var (
	errForeignValue  = errors.New("the key holds something that is not a lock")
	errUnknownFormat = errors.New("the key holds a lock in a format this version cannot read")
)

type record struct {
	Holder
	Token string `json:"token"`
}

// encodeValue returns the string kept at the key: readable in redis-cli, unique by its token. It writes JSON by hand, since
// every lock pays for it.
func encodeValue(h Holder, token string) string {
	b := make([]byte, 0, 512)
	b = append(b, valueVersion+"{"...)
	for _, field := range []struct{ name, text string }{{"task_id", h.TaskID}, {"task_type", h.TaskType}, {"queue", h.Queue}} {
		if field.text != "" {
			b = append(b, '"')
			b = append(b, field.name...)
			b = appendJSON(append(b, `":`...), field.text)
			b = append(b, ',')
		}
	}
	b = appendJSON(append(b, `"host":`...), h.Host)
	b = strconv.AppendInt(append(b, `,"pid":`...), int64(h.PID), 10)
	b = h.Since.UTC().Truncate(time.Millisecond).AppendFormat(append(b, `,"since":"`...), time.RFC3339Nano)
	if h.Done {
		b = append(b, `","done":true,"token":`...)
	} else {
		b = append(b, `","token":`...)
	}
	return string(append(appendJSON(b, token), '}'))
}

// appendJSON appends a JSON string. What is not plain goes the long way.
func appendJSON(b []byte, text string) []byte {
	for i := range len(text) {
		if c := text[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			quoted, err := json.Marshal(text)
			if err != nil {
				panic(err) // a string always marshals
			}
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), text...), '"')
}

// decodeValue reads what encodeValue wrote. It fails with errForeignValue or, for a format of another version,
// errUnknownFormat.
func decodeValue(value string) (Holder, error) {
	text, ours := strings.CutPrefix(value, valueVersion)
	if !ours {
		if strings.HasPrefix(value, valueFamily) {
			return Holder{}, errUnknownFormat
		}
		return Holder{}, errForeignValue
	}
	var r record
	if json.Unmarshal([]byte(text), &r) != nil || r.Token == "" {
		return Holder{}, errForeignValue // the decoder's own error would quote the text
	}
	return r.Holder, nil
}
