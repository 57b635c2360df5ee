/* What a library of tests is told by a variable of the environment: "name=number,name=number". */
#include <stdlib.h>
#include <string.h>

static long setting_of(const char *variable, const char *name, long otherwise) {
    const char *text = getenv(variable);
    size_t length = strlen(name);
    while (text && *text) {
        if (strncmp(text, name, length) == 0 && text[length] == '=') return strtol(text + length + 1, NULL, 10);
        text = strchr(text, ',');
        if (text) text++;
    }
    return otherwise;
}
