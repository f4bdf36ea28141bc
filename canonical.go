package redislock

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// What can be wrong with a payload. None of these quotes it, as the errors of encoding/json do.
var (
	errNotJSON       = errors.New("not JSON in UTF-8")
	errRepeatedKey   = errors.New("the same key twice in an object")
	errLoneSurrogate = errors.New("half of a surrogate pair in a string")
)

// parseJSON reads a document that means one thing only. Where encoding/json would choose for itself (the last one of repeated
// keys, a replacement character for what is no character), two different documents would come out the same.
func parseJSON(doc []byte) (any, error) {
	if !utf8.Valid(doc) || !json.Valid(doc) {
		return nil, errNotJSON
	}
	if hasLoneSurrogate(doc) {
		return nil, errLoneSurrogate
	}
	decoder := json.NewDecoder(bytes.NewReader(doc))
	decoder.UseNumber()
	return parseValue(decoder)
}

// parseValue reads the next value. Its depth is bounded: encoding/json finds no document valid that nests deeper than 10,000.
func parseValue(decoder *json.Decoder) (value any, err error) {
	token, err := decoder.Token()
	if err != nil {
		return nil, errNotJSON
	}
	switch token {
	case json.Delim('['):
		var array []any
		for decoder.More() {
			element, err := parseValue(decoder)
			if err != nil {
				return nil, err
			}
			array = append(array, element)
		}
		value = array
	case json.Delim('{'):
		object := map[string]any{}
		for decoder.More() {
			key, err := decoder.Token()
			name, ok := key.(string)
			if err != nil || !ok {
				return nil, errNotJSON
			}
			if _, repeated := object[name]; repeated {
				return nil, errRepeatedKey
			}
			if object[name], err = parseValue(decoder); err != nil {
				return nil, err
			}
		}
		value = object
	default:
		return token, nil
	}
	if _, err := decoder.Token(); err != nil { // the closing bracket
		return nil, errNotJSON
	}
	return value, nil
}

// hasLoneSurrogate looks for escapes from \ud800 to \udfff that are no pair. It relies on valid JSON, where a backslash is
// always in a string and never the end of it.
func hasLoneSurrogate(doc []byte) bool {
	for {
		start := bytes.IndexByte(doc, '\\')
		if start < 0 {
			return false
		}
		doc = doc[start:]
		unit := escapedUnit(doc)
		switch {
		case unit < 0:
			doc = doc[2:]
		case !utf16.IsSurrogate(unit):
			doc = doc[6:]
		case utf16.DecodeRune(unit, escapedUnit(doc[6:])) == unicode.ReplacementChar:
			return true
		default:
			doc = doc[12:]
		}
	}
}

// escapedUnit is the UTF-16 unit of the \u escape that text starts with, or -1 if it starts with something else.
func escapedUnit(text []byte) rune {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return -1
	}
	unit, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(unit)
}

// lookUp follows route through the objects of a document.
func lookUp(doc any, route []string) (value any, ok bool) {
	value = doc
	for _, name := range route {
		object, _ := value.(map[string]any)
		if value, ok = object[name]; !ok {
			return nil, false
		}
	}
	return value, true
}

// appendCanonical appends a parsed value so that equal values, and no others, come out the same. A letter for its type and
// the length of whatever varies say where it ends, so that values can stand in a row.
func appendCanonical(b []byte, value any) []byte {
	switch value := value.(type) {
	case bool:
		return strconv.AppendBool(b, value)
	case json.Number:
		return appendText(append(b, '#'), canonicalNumber(string(value)))
	case string:
		return appendText(append(b, '"'), value)
	case []any:
		b = binary.AppendUvarint(append(b, '['), uint64(len(value)))
		for _, element := range value {
			b = appendCanonical(b, element)
		}
		return b
	case map[string]any:
		b = binary.AppendUvarint(append(b, '{'), uint64(len(value)))
		for _, name := range slices.Sorted(maps.Keys(value)) {
			b = appendCanonical(appendText(b, name), value[name])
		}
		return b
	default: // null
		return append(b, "null"...)
	}
}

// canonicalNumber spells a JSON number in the one way that all its spellings share: sign, digits without a zero at either end,
// exponent. It keeps every digit and writes no new one: 1e999999999 stays as short as it is.
func canonicalNumber(number string) string {
	number, negative := strings.CutPrefix(strings.ToLower(number), "-")
	number, exponent, _ := strings.Cut(number, "e")
	whole, fraction, _ := strings.Cut(number, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	significant := strings.TrimRight(digits, "0")
	if significant == "" {
		return "0"
	}
	text := significant + "e" + addToExponent(exponent, int64(len(digits)-len(significant)-len(fraction)))
	if negative {
		text = "-" + text
	}
	return text
}

// addToExponent adds n to the exponent of a JSON number ("" is 0). An exponent may be as long as the payload, and math/big
// takes seconds to read a million digits.
func addToExponent(exponent string, n int64) string {
	magnitude, negative := strings.CutPrefix(exponent, "-")
	magnitude = strings.TrimLeft(magnitude, "+0")
	if negative {
		n = -n
	}
	if len(magnitude) <= 18 { // fits an int64, with n
		small, _ := strconv.ParseInt("0"+magnitude, 10, 64)
		n += small
		if negative {
			n = -n
		}
		return strconv.FormatInt(n, 10)
	}
	sum := []byte(magnitude)
	for i := len(sum) - 1; i >= 0 && n != 0; i-- { // n is the carry
		n += int64(sum[i] - '0')
		digit := (n%10 + 10) % 10
		sum[i] = '0' + byte(digit)
		n = (n - digit) / 10
	}
	text := strings.TrimLeft(strconv.FormatInt(n, 10)+string(sum), "0")
	if negative {
		text = "-" + text
	}
	return text
}
